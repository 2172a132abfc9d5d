"""The options of the serving engine, shared by `serve` and `generate`, and the engine that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import number_of_bytes, require_checkpoint

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine

Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint directory with its tokenizer.json.")]
Tokenizer = Annotated[str | None, typer.Option(help="Path to a tokenizer.json, if the checkpoint has none.")]
ChatTemplate = Annotated[
    str | None, typer.Option(help="A Jinja file, or chatml, llama2, alpaca (the checkpoint's own).")
]
Length = Annotated[int | None, typer.Option(min=2, help="Maximum sequence length (prompt plus output), in tokens.")]
Seqs = Annotated[int | None, typer.Option(min=1, help="Maximum sequences per step.")]
BatchedTokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens per step.")]
Pool = Annotated[str | None, typer.Option(help="Memory for the KV cache: 600MB, 1.5GiB, …")]


def make_engine(
    checkpoint: Path, with_: list[str] | None, length: int | None, seqs: int | None, tokens: int | None,
    pool: str | None, more: tuple[str, ...] = (),
) -> Engine:  # fmt: skip
    """The engine of the default plan and ``more``, where ``--with`` does not give their options itself; -NAME leaves a
    technique of these out."""
    from ridgeline.experiments import plan_of
    from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
    from ridgeline.spec.errors import unknown
    from ridgeline.spec.model import ModelSpec
    from ridgeline.spec.plan import Call

    require_checkpoint(checkpoint)
    default, given = (*DEFAULT_PLAN, *more), with_ or []
    mixture = ModelSpec.from_path(checkpoint).num_experts > 0
    wanted = plan_of([item for item in given if not item.startswith("-")], "--with", mixture).strings()
    off = [item[1:] for item in given if item.startswith("-")]
    for name in off:
        if name not in default:
            raise unknown("technique", name, default, f"--with -{name}")
    named = {*off, *(Call.parse(item).name for item in wanted)}
    plan = [*(name for name in default if name not in named), *wanted]
    return load_engine(checkpoint, plan, max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=tokens,
                       kv_cache_bytes=number_of_bytes("--kv-cache", pool))  # fmt: skip
