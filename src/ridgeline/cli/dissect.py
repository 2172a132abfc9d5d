"""`ridgeline dissect`: profiled steps of training, generation or serving, module by module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    say,
)


@app.command()
def dissect(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Directory for the traces.")] = Path("runs/dissect"),
    json: Json = False,
) -> None:
    """Where do the time and the bytes go, module by module, phase by phase, operator by operator?"""
    from ridgeline.measure.bench import dissect as run
    from ridgeline.report.console import Status, print_dissection

    e = probed(lambda: load(file, plan, [*(overrides or []), *data_override(data)]))
    with Status(f"dissecting {e.name or e.model.name}") as status:
        name = e.name or e.id
        out.mkdir(parents=True, exist_ok=True)
        traces = out / f"{name}.measured.json", out / f"{name}.predicted.json"
        predicted, measured = run(e, traces[0], status.message)
    if e.is_training:
        predicted_trace(e, traces[1])
    keep(measured)
    print(measured.to_json()) if json else print_dissection(predicted, measured)
    say("Chrome traces (open in Perfetto): " + ", ".join(str(t) for t in traces if t.is_file()))
