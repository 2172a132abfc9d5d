"""The options that describe a workload, shared by every command that asks about one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.spec.errors import UserError

Given = dict[str, Any]
"""A workload's fields as given; None where an option was left out."""


def _options(
    seq_len: Annotated[str | None, typer.Option(help="Tokens per sequence (training); 4k is 4096.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step over all devices.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Sequences per device and forward pass.")] = None,
    prompt_len: Annotated[str | None, typer.Option(help="Prompt tokens (generate; mean in serve).")] = None,
    output_len: Annotated[str | None, typer.Option(help="Tokens to generate (generate; mean in serve).")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second (serve).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Clients of a closed loop (serve).")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="Trace of requests, CSV or JSON lines (serve).")] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests (serve).")] = None,
    engine: Annotated[str | None, typer.Option(help="Serving software: ridgeline, vllm, vllm-2023, trtllm.")] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds allowed to the first token (serve).")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Seconds allowed per further token (serve).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Storage dtype of the weights: fp32, bf16, fp16.")] = None,
) -> Given:
    return {
        "seq_len": _length("seq_len", seq_len), "batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "prompt_len": _length("prompt_len", prompt_len), "output_len": _length("output_len", output_len),
        "rate": rate, "concurrency": concurrency, "trace": str(arrivals) if arrivals else None, "requests": requests,
        "engine": engine, "slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "dtype": dtype,
    }  # fmt: skip


def workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; it gets them in one dictionary, ``given``."""
    own = inspect.signature(command, eval_str=True)
    shared = inspect.signature(_options, eval_str=True).parameters
    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "given"]

    def run(**values: Any) -> None:
        given = _options(**{k: values.pop(k) for k in shared})
        command(**values, given=given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*kept, *(p.replace(kind=p.KEYWORD_ONLY) for p in shared.values())])  # type: ignore[attr-defined]
    return run


def _length(name: str, text: str | None) -> int | None:
    from ridgeline.spec.plan import scalar

    if text is None:
        return None
    value = scalar(text)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"--{name.replace('_', '-')} {text!r} is not a whole number", "write 4096 or 4k")
    return value
