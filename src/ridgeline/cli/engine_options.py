"""The options of the serving engine, shared by `serve` and `generate`, and the engine that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import number_of_bytes, require_checkpoint, say

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
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="Device memory to use: 8GiB, …; layers that do not fit rest in host memory or on --disk."),
]
DType = Annotated[
    str,
    typer.Option(
        help="Dtype of the weights: fp32, bf16, fp16, or auto (bf16 on a GPU; on a CPU fp32, or bf16 for a checkpoint"
        " in bf16 where the CPU multiplies it)."
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        help="Back end of an operator on a GPU: attention=flashinfer, attention.decode=torch, … (the fastest that"
        " `ridgeline probe` measured); repeatable."
    ),
]
HostMemory = Annotated[str | None, typer.Option(help="Host memory that layers may rest in: 32GiB, …")]
SecretFile = Annotated[
    Path | None,
    typer.Option(help="File with the secret that a fleet's machines share (or RIDGELINE_FLEET_SECRET)."),
]
TlsCert = Annotated[Path | None, typer.Option(help="This machine's certificate (PEM); connections are encrypted then.")]
TlsKey = Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")]
TlsCa = Annotated[Path | None, typer.Option(help="Certificate of the authority whose certificates are accepted (PEM).")]
TlsClients = Annotated[
    bool, typer.Option("--tls-clients", help="Clients, too, must show a certificate of the authority.")
]
DiskFolder = Annotated[Path | None, typer.Option("--disk", help="Folder on a disk that layers may rest on.")]

_DTYPES = ("auto", "fp32", "bf16", "fp16")


def make_engine(
    checkpoint: Path, with_: list[str] | None, length: int | None, seqs: int | None, tokens: int | None,
    pool: str | None, dtype: str, more: tuple[str, ...] = (),
    memory: tuple[str | None, str | None, Path | None] = (None, None, None), kernels: list[str] | None = None,
) -> Engine:  # fmt: skip
    """The engine of the default plan and ``more``, where ``--with`` does not give their options itself; -NAME leaves a
    technique of these out.

    ``memory``: limits of device and host memory, and a folder on disk; where any is given, the fastest predicted
    placement of the weights within them is added to the plan and printed.
    """
    from ridgeline.experiments import plan_of
    from ridgeline.imports import uncollected
    from ridgeline.spec.errors import unknown
    from ridgeline.spec.model import ModelSpec
    from ridgeline.spec.plan import Call

    with uncollected():
        from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
    require_checkpoint(checkpoint)
    if dtype not in _DTYPES:
        raise unknown("dtype", dtype, _DTYPES, "--dtype")
    default, given = (*DEFAULT_PLAN, *more), with_ or []
    mixture = ModelSpec.from_path(checkpoint).num_experts > 0
    wanted = plan_of([item for item in given if not item.startswith("-")], "--with", mixture).strings()
    _for_engines(wanted)
    off = [item[1:] for item in given if item.startswith("-")]
    for name in off:
        if name not in default:
            raise unknown("technique", name, default, f"--with -{name}")
    named = {*off, *(Call.parse(item).name for item in wanted)}
    plan = [*(name for name in default if name not in named), *wanted]
    options: dict[str, Any] = {"max_model_len": length, "max_num_seqs": seqs, "max_num_batched_tokens": tokens,
               "kv_cache_bytes": number_of_bytes("--kv-cache", pool), "dtype": dtype,
               "kernels": _kernels(kernels or [])}  # fmt: skip
    if any(limit is not None for limit in memory):
        return _placed(checkpoint, plan, memory, options)
    return load_engine(checkpoint, plan, **options)


def _kernels(given: list[str]) -> dict[str, str]:
    """What ``--kernels`` asks for."""
    from ridgeline.spec.backends import checked
    from ridgeline.spec.errors import UserError

    asked = dict(item.split("=", 1) for item in given if "=" in item)
    if len(asked) < len(given):
        raise UserError(f"--kernels {' '.join(given)} is not OPERATOR=BACKEND, each once", "write attention=flashinfer")
    return checked(asked)


def _for_engines(plan: list[str]) -> None:
    """Refuse techniques that the serving engine does not have, though ``generate`` is the name of their task."""
    from ridgeline.spec.errors import Incompatible
    from ridgeline.techniques.registry import registry

    for name in (item.partition(":")[0] for item in plan):
        tasks = registry()[name].card.tasks
        if "serve" not in tasks:
            where = ", ".join(sorted(tasks))
            raise Incompatible(
                f"{name} is not in the serving engine, which `generate` and `serve` use",
                f"leave it out; it works in experiments of task {where}, which `ridgeline predict` and `bench` take",
            )


@dataclass(frozen=True)
class EngineOptions:
    """A server's engine, as it is asked for."""

    checkpoint: Path
    plan: list[str] | None
    length: int | None
    seqs: int | None
    tokens: int | None
    pool: str | None
    dtype: str
    more: tuple[str, ...]
    memory: tuple[str | None, str | None, Path | None]
    scheduling_policy: str
    ahead: bool | None
    """Asynchronous scheduling; None: as is best."""
    kernels: list[str] | None


def build(o: EngineOptions) -> Engine:
    """The engine that is asked for; here, or in a process of its own. Raises :class:`UserError`."""
    from ridgeline.serve.scheduler import share

    made = make_engine(o.checkpoint, o.plan, o.length, o.seqs, o.tokens, o.pool, o.dtype, o.more, o.memory,
                       o.kernels)  # fmt: skip
    share(made.scheduler, o.scheduling_policy)
    if o.ahead is not None:
        go_ahead(made, o.ahead)
    return made


def go_ahead(engine: Engine, wanted: bool) -> None:
    """Switch asynchronous scheduling on or off. Raises :class:`UserError` for an engine that cannot."""
    from ridgeline.spec.errors import UserError

    if not wanted:
        engine.ahead = None
    elif why := engine.go_ahead():
        engine.close()
        raise UserError(f"--async-scheduling does not apply: {why}", "leave it out")


def _placed(
    checkpoint: Path, plan: list[str], memory: tuple[str | None, str | None, Path | None], options: dict[str, Any]
) -> Engine:
    """The engine within limits of memory."""
    from ridgeline import catalog
    from ridgeline.report.units import metric
    from ridgeline.search.placement import MemoryLimits, place
    from ridgeline.serve.build_engine import default_dtype, load_engine

    catalog.allow_unprobed()
    device, host, disk = memory
    if options["dtype"] == "auto":
        options["dtype"] = default_dtype(checkpoint)
    limits = MemoryLimits(number_of_bytes("--device-memory", device), number_of_bytes("--host-memory", host), disk)
    found = place(checkpoint, plan, limits, sequences=options["max_num_seqs"] or 64, **options)
    width = max(len(what) for what, _, _ in found.rows)
    for what, where, size in found.rows:
        say(f"{what:<{width}}  {where:<11}  {metric(size, 'bytes')}")
    rate = metric(found.rate, "tokens/s")
    say(f"bound by {found.bound}; {rate} predicted with {found.sequences} sequences at a time")
    for size, times in found.more:
        say(f"with {metric(size, 'bytes')} of device memory: {times:.2f}x")
    options["kv_cache_bytes"] = found.cache
    return load_engine(checkpoint, found.experiment.plan.strings(), cluster=found.experiment.cluster, **options)
