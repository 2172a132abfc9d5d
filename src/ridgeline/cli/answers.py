"""Questions answered without running anything: predict, and what its numbers rest on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import Json, On, PlanName, With, app, load, predicted_trace, say, store
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.spec.result import Result


# ---- predict ------------------------------------------------------------------------------------------------------


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Model: catalogue name, config.json, checkpoint directory, or a TOML.")],
    on: On = "local",
    task: Annotated[str, typer.Option(help="pretrain, finetune or generate.")] = "pretrain",
    with_: With = None,
    seq_len: Annotated[str | None, typer.Option(help="Tokens per sequence (training); 4k is 4096.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step over all devices.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Sequences per device and forward pass.")] = None,
    prompt_len: Annotated[str | None, typer.Option(help="Prompt tokens (generate).")] = None,
    output_len: Annotated[str | None, typer.Option(help="Tokens to generate (generate).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Storage dtype of the weights: fp32, bf16, fp16.")] = None,
    plan: PlanName = None,
    trace: Annotated[Path | None, typer.Option(help="Also write the predicted step as a Chrome trace.")] = None,
    save: Annotated[bool, typer.Option(help="Keep the result in the store.")] = False,
    json: Json = False,
) -> None:
    """What will this plan give on that hardware? Exit code 1 when it does not fit."""
    from ridgeline import experiments
    from ridgeline.predict import predict as run

    if model.endswith(".toml"):
        e = load(model, plan, [])
    else:
        given = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "dtype": dtype}
        given |= {k: _length(k, v) for k, v in
                  (("seq_len", seq_len), ("prompt_len", prompt_len), ("output_len", output_len))}  # fmt: skip
        workload = {"kind": task, **{k: v for k, v in given.items() if v is not None}}
        if task in ("pretrain", "finetune") and seq_len is None:
            from ridgeline import catalog

            workload["seq_len"] = min(2048, catalog.model(model).max_positions)
        e = experiments.make(model, on, workload, with_ or [])
    result = run(e)
    if trace:
        predicted_trace(e, trace)
    _show(result, json, save)
    if result.status == "infeasible":
        raise typer.Exit(1)


@app.command()
def probe(
    ranks: Annotated[int, typer.Option(help="Measure up to this many processes sharing the machine.")] = 2,
    quick: Annotated[bool, typer.Option(help="Shorter and rougher.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine (operators, memory, loopback collectives) and keep the profile as device `local`."""
    from ridgeline.measure.probe import probe as run
    from ridgeline.report.console import Status, device_table

    with Status("probing this machine") as status:
        device, file = run(max_ranks=ranks, quick=quick, progress=status.message)
    say(f"profile kept in {file}")
    print(device.model_dump_json(indent=2)) if json else device_table(device)


def _length(name: str, text: str | None) -> int | None:
    from ridgeline.spec.plan import scalar

    if text is None:
        return None
    value = scalar(text)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"--{name.replace('_', '-')} {text!r} is not a whole number", "write 4096 or 4k")
    return value


def _show(result: Result, json: bool, save: bool) -> None:
    if save:
        say(f"stored as {store().add_result(result)}")
    if json:
        print(result.to_json())
    else:
        from ridgeline.report.console import print_result

        print_result(result)


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(metavar="DIR_OR_CSV", help="Measured data: a CSV file, or a directory.")],
    plot: Annotated[Path | None, typer.Option(help="Also write a page of measured-against-predicted pictures.")] = None,
    json: Json = False,
) -> None:
    """How far are predictions from measurements? Judges every row of the files, beside a trivial baseline."""
    import json as js

    from ridgeline.report import console, validation
    from ridgeline.validate.run import run

    with console.Status(f"validating {path.name}") as status:
        report = run(path, lambda file, at, rows: status.progress.update(status.task, note=f"{file} {at}/{rows}"))
    if plot:
        validation.validation_html(report, plot)
        say(f"wrote {plot}")
    if json:
        print(js.dumps(report.as_dict()))
    else:
        tables = [validation.score_table(report), validation.regret_table(report), validation.worst_table(report)]
        console.print_tables(*(t for t in tables if t is not None))
        for line in validation.skipped_lines(report):
            say(line)
    if not report.judged:
        say("no row could be judged")
        raise typer.Exit(1)
