"""`ridgeline dissect`: profiled steps of training, generation or serving, module by module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ridgeline.cli.base import (
    Data,
    File,
    Json,
    Overrides,
    PlanName,
    app,
    data_override,
    keep,
    load,
    predicted_trace,
    probed,
    require_writable,
    say,
)

if TYPE_CHECKING:
    from ridgeline.spec.experiment import Experiment


@app.command()
def dissect(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Directory for the traces.")] = Path("runs/dissect"),
    trace: Annotated[
        Literal["run", "fake"],
        typer.Option(help="run: measured steps; fake: what a step launches and waits for on a GPU that is not there."),
    ] = "run",
    json: Json = False,
) -> None:
    """Where do the time and the bytes go, module by module, phase by phase, operator by operator?"""
    if trace == "fake":
        _fake(load(file, plan, [*(overrides or []), *data_override(data)]), json)
        return
    from ridgeline.measure.bench import dissect as run
    from ridgeline.report.console import Status, print_dissection

    e = probed(lambda: load(file, plan, [*(overrides or []), *data_override(data)]))
    with Status(f"dissecting {e.name or e.model.name}") as status:
        name = f"{e.name}-{e.id}" if e.name else e.id  # plans of several files may have one name
        require_writable("--out", out)
        traces = out / f"{name}.measured.json", out / f"{name}.predicted.json"
        predicted, measured = run(e, traces[0], status.message)
    if e.is_training:
        predicted_trace(e, traces[1])
    keep(measured)
    print(measured.to_json()) if json else print_dissection(predicted, measured)
    say("Chrome traces (open in Perfetto): " + ", ".join(str(t) for t in traces if t.is_file()))


def _fake(e: Experiment, as_json: bool) -> None:
    """Trace the experiment's steps without the hardware, and print them beside the predicted time."""
    import json

    from ridgeline.measure.fake.tables import fake_trace_json, fake_trace_tables
    from ridgeline.measure.fake.trace import trace
    from ridgeline.predict import predict
    from ridgeline.report.console import Status, print_tables

    with Status(f"tracing {e.name or e.model.name} on a fake GPU"):
        (steps,) = trace([e])
    if as_json:
        print(json.dumps(fake_trace_json(steps)))
        return
    metrics = predict(e).metrics
    predicted = metrics.get("step_time_s") or metrics.get("itl_s")
    print_tables(
        *fake_trace_tables(steps, e.cluster.device.launch_latency, None if predicted is None else predicted.value)
    )
