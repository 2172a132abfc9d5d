"""`ridgeline bench`: one experiment, measured beside its prediction."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import (
    Backend,
    Data,
    File,
    Json,
    Overrides,
    PlanName,
    app,
    data_override,
    keep,
    load,
    next_command,
    probed,
)


@app.command()
def bench(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of processes to measure, one after another.")] = 3,
    backend: Backend = "native",
    json: Json = False,
) -> None:
    """Measure one experiment, with its prediction beside it."""
    from ridgeline.measure.bench import bench as run
    from ridgeline.report.console import StepBar, print_pair

    e = probed(lambda: load(file, plan, [*(overrides or []), *data_override(data)]))
    with StepBar(f"measuring {e.name or e.model.name}", 0) as bar:
        predicted, measured = run(e, repeats, bar.message, backend)
    keep(predicted, measured)
    print(measured.to_json()) if json else print_pair(predicted, measured)
    next_command("dissect", file, *(["--plan", plan] if plan else []))
    if measured.status != "ok":
        raise typer.Exit(1)
