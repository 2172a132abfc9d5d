"""The options that describe a workload, shared by all commands that take one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import load
from ridgeline.cli.completion import models
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.spec.experiment import Experiment

Model = Annotated[
    str,
    typer.Argument(help="Model: catalog name, config.json, checkpoint directory, or a TOML.", autocompletion=models),
]
Task = Annotated[str, typer.Option(help="Task: pretrain, finetune, generate or serve.")]
Given = dict[str, Any]
"""A workload's fields as given; None where an option was left out."""


def _options(
    seq_len: Annotated[str | None, typer.Option(help="Sequence length in tokens (training); 4k is 4096.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch size, in sequences.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Micro-batch size per device, in sequences.")] = None,
    prompt_len: Annotated[str | None, typer.Option(help="Prompt length in tokens (generate; mean for serve).")] = None,
    output_len: Annotated[str | None, typer.Option(help="Output length in tokens (generate; mean for serve).")] = None,
    length_cv: Annotated[
        float | None, typer.Option(help="Coefficient of variation of both lengths; 0: all equal (serve).")
    ] = None,
    output_cv: Annotated[
        float | None, typer.Option(help="That of output lengths alone, as --length-cv if left out (serve).")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second (serve).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Number of closed-loop clients (serve).")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="Trace of requests, CSV or JSON lines (serve).")] = None,
    requests: Annotated[int | None, typer.Option(help="Number of requests (serve).")] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(min=0, help="Length of the shared prompt prefix, in tokens (serve).")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Serving engine: ridgeline, vllm, sglang, trtllm, tgi, …")] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Objective for the time to first token, in seconds (serve).")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Objective for the time per output token, in seconds (serve).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Storage dtype of the weights: fp32, bf16, fp16.")] = None,
) -> Given:
    return {
        "seq_len": _length("seq_len", seq_len), "batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "prompt_len": _length("prompt_len", prompt_len), "output_len": _length("output_len", output_len),
        "length_cv": length_cv, "output_cv": output_cv, "rate": rate, "concurrency": concurrency,
        "trace": str(arrivals) if arrivals else None, "requests": requests, "shared_prefix": shared_prefix,
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


def experiment_from_options(
    ctx: typer.Context, model: str, on: str, task: str, with_: list[str] | None, plan: str | None, given: Given
) -> Experiment:
    """The experiment of a command's options, or of a TOML file, which goes with none of them but ``--plan``."""
    from ridgeline import experiments

    if model.endswith(".toml"):
        for option in _written(ctx, "on", "task", "with_", *inspect.signature(_options).parameters):
            raise UserError(f"{option} does not go with an experiment file", f"change {model}, or give a model's name")
        return load(model, plan, [])
    if plan:
        raise UserError(f"--plan {plan} does not go with a model", "it chooses among the plans of an ablation's file")
    return experiments.make(model, on, workload_fields(model, task, given, on, with_), with_ or [])


def _written(ctx: typer.Context, *names: str) -> list[str]:
    """The options that a command line has among those of these parameters, defaults that are written out too."""
    sources = {p.opts[0]: ctx.get_parameter_source(p.name) for p in ctx.command.params if p.name in names}
    return [option for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def workload_fields(model: str, task: str, given: Given, on: str = "", with_: list[str] | None = None) -> Given:
    """The workload's fields among a command's options; training defaults to 2048 tokens where the model has them.

    A system on its paper's own model and cluster defaults to the paper's workload.
    """
    from ridgeline import experiments

    fields = {k: v for k, v in given.items() if v is not None}
    if not model.endswith(".toml"):
        fields = {**experiments.reported_workload(model, on, task, with_ or []), **fields}
    if task in ("pretrain", "finetune") and "seq_len" not in fields and not model.endswith(".toml"):
        from ridgeline import catalog

        fields["seq_len"] = min(2048, catalog.model(model).max_positions)
    return {"kind": task, **fields}
