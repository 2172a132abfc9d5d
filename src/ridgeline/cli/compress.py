"""`ridgeline compress`: a checkpoint in, a smaller one that loads elsewhere out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.base import Json, With, app, next_command, require_checkpoint, say
from ridgeline.cli.jobs import failed


@app.command()
def compress(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    with_: With = None,
    calib: Annotated[
        str, typer.Option(help="Calibration text: a file, a directory, stdlib, hf:NAME, or self.")
    ] = "stdlib",
    samples: Annotated[int, typer.Option(min=1, help="Number of calibration windows.")] = 128,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window (default 2048, capped at the model's context length).")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Checkpoint format: compressed-tensors (default where possible), gptq, gguf, ridgeline, dense.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Resume where the same command was stopped.")] = True,
    tokenizer: Annotated[str | None, typer.Option(help="Path to a tokenizer.json, if the checkpoint has none.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the calibration windows.")] = 0,
    json: Json = False,
) -> None:
    """Compress a checkpoint, layer by layer. Finished layers survive Ctrl-C; the same command resumes."""
    import json as js

    from ridgeline import catalog, experiments
    from ridgeline.jobs.job import CompressOptions, LaunchJob
    from ridgeline.jobs.launch import JobFailed, run_job
    from ridgeline.report.console import StepBar
    from ridgeline.spec.errors import UserError

    catalog.allow_unprobed()
    require_checkpoint(checkpoint)
    if not with_:
        raise UserError("nothing to compress with", "--with gptq:bits=4,group_size=128 (see `ridgeline techniques`)")
    path = str(checkpoint.resolve())
    model = catalog.model(path)
    workload = {
        "kind": "compress", "checkpoint": path, "data": calib, "samples": samples,
        "seq_len": seq_len or min(2048, model.max_positions), "tokenizer": tokenizer, "seed": seed,
        "prompt_len": min(64, model.max_positions // 2), "output_len": min(32, model.max_positions // 2),
    }  # fmt: skip
    e = experiments.make(path, "local", workload, list(with_))
    options = CompressOptions(out=str(out.resolve()), format=format_, resume=resume)
    with StepBar(f"compressing {checkpoint.name}", model.num_layers) as bar:
        try:
            result = run_job(LaunchJob("compress", e, options), bar.message)
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with what lies in {out}.partial")
            raise typer.Exit(130) from None
        except JobFailed as failure:
            raise failed(failure) from None
    if json:
        print(js.dumps(result))
        return
    _print(result, out)
    if format_ != "gguf":
        next_command("eval", out, "--text", "stdlib-prose", "--against", checkpoint)


def _print(result: dict[str, Any], out: Path) -> None:
    from ridgeline.report.units import size

    layers = result["layers"]
    known = [la["error"] for la in layers if la["error"] is not None]
    worst = max((la for la in layers if la["error"] is not None), key=lambda la: la["error"], default=None)
    print(f"{len(layers)} linear layers at {result['bits_per_weight']:.2f} bits per weight"
          + (f", {result['zeros']:.1%} zeros" if result["zeros"] > 0.01 else ""))  # fmt: skip
    if worst is not None:
        mean = sum(known) / len(known)
        print(f"relative layer error {mean:.3%} in the mean, at worst {worst['error']:.3%} in {worst['layer']}")
    print(f"{size(result['checkpoint_bytes'])} of tensors, {result['seconds']:.0f} s, "
          f"peak memory {size(result['peak_rss_bytes'])}")  # fmt: skip
    print(f"written to {out}")
