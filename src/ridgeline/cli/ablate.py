"""`ridgeline ablate`: every plan of a file, predicted and measured against the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import (
    Data,
    File,
    Json,
    Overrides,
    app,
    command_line,
    data_override,
    next_command,
    probed,
    require_writable,
    say,
    store,
)

if TYPE_CHECKING:
    from ridgeline.experiments import AblationSpec
    from ridgeline.spec.result import Result


@app.command()
def ablate(
    file: File,
    overrides: Overrides = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Directory of cells and results (default runs/NAME-ID).")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Where to write the HTML report (default report.html beside the cells).")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Measure again, ignoring the results of an earlier run.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would be measured, with predictions, and stop.")] = False,
    json: Json = False,
) -> None:
    """Which techniques help, by how much, and why? Every plan predicted and measured, against the baseline.

    An interrupted ablation resumes when the same command is run again.
    """
    from ridgeline import experiments
    from ridgeline.measure.ablate import ablation_key, require_measurable, run_ablation
    from ridgeline.report.console import AblationBar, print_ablation, print_plan_predictions
    from ridgeline.report.html import ablation_html

    spec = probed(lambda: experiments.load_ablation(file, [*(overrides or []), *data_override(data)]))
    folder = out or Path("runs") / f"{spec.name}-{ablation_key(spec)}"
    if dry_run:
        _dry_run(spec, folder, json)
        return
    require_measurable(spec)
    require_writable("--out", folder)
    report = report or folder / "report.html"
    require_writable("--report", file=report)

    def announce(predicted: dict[str, Result]) -> None:
        if not json:
            note = f"each is measured now, in {spec.measure.repeats} processes; finished ones are kept in {folder}"
            print_plan_predictions(list(predicted.items()), "predicted", note)

    try:
        with AblationBar(spec) as bar:
            outcome = run_ablation(spec, folder, command_line(), bar.watch, announce, fresh)
    except KeyboardInterrupt:
        say(f"\ninterrupted; finished cells are kept in {folder}: give the same command again to go on")
        raise
    store_id = store().add_ablation(outcome)
    ablation_html(outcome, report)
    print(outcome.to_json()) if json else print_ablation(outcome)
    say(f"report: {report}   stored as {store_id}   cells in {folder}")
    faster = [o for o in outcome.outcomes if o.verdict == "faster" and o.speedup is not None]
    fastest = max(faster, key=lambda o: o.speedup.value if o.speedup else 0.0, default=None)
    next_command("dissect", file, "--plan", fastest.name if fastest else outcome.baseline)
    if all(o.verdict == "failed" for o in outcome.outcomes):
        raise typer.Exit(1)


def _dry_run(spec: AblationSpec, folder: Path, json: bool) -> None:
    import json as js

    from ridgeline.predict import predict as run
    from ridgeline.report.console import print_plan_predictions

    rows = [(name, run(e)) for name, e in spec.plans.items()]
    if json:
        print(js.dumps({name: js.loads(r.to_json()) for name, r in rows}))
    else:
        note = f"{len(rows)} plans × {spec.measure.repeats} processes; cells would go to {folder}"
        print_plan_predictions(rows, "predicted (nothing was measured)", note)
