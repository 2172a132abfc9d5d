"""`ridgeline merge`: an adapter merged into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import app, next_command, require_writable


@app.command()
def merge(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory.")],
    adapter: Annotated[Path, typer.Argument(help="Directory of an adapter trained on it.")],
    out: Annotated[Path, typer.Option(help="Directory of the merged model.")],
) -> None:
    """Merge an adapter into the weights of its base: a plain checkpoint that needs no adapter library."""
    import shutil

    from ridgeline.data.tokenizer import copy_settings
    from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
    from ridgeline.spec.errors import UserError
    from ridgeline.train.adapter_folder import merged_model

    for what, given in (("checkpoint", checkpoint), ("adapter", adapter)):
        if out.resolve() == given.resolve():
            raise UserError(f"--out {out} is the {what} itself", "give another directory")
    require_writable("--out", out)
    save_checkpoint(merged_model(checkpoint, adapter), out)
    if (checkpoint / "tokenizer.json").is_file():
        shutil.copyfile(checkpoint / "tokenizer.json", out / "tokenizer.json")
    copy_settings(checkpoint, out)
    print(f"written to {out}")
    next_command("serve", out)
