"""`--fleet` of `ridgeline predict` and `ridgeline plan`: a fleet predicted, or sized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.cli.base import next_command, say
from ridgeline.cli.workload_options import Given, workload_fields

if TYPE_CHECKING:
    from ridgeline.search.fleet_size import Goal, Sized
    from ridgeline.spec.result import Result

SHOWN = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "requests_per_s", "dollars_per_hour", "watts")


def predicted_fleet(file: Path, model: str, task: str, given: Given, others: Mapping[str, object]) -> Result:
    """The prediction of a fleet file. ``others``: options that do not go with it, and whether they were given."""
    from ridgeline import fleets
    from ridgeline.predict.fleet.predict_fleet import predict_fleet

    _refuse(task, others)
    spec = fleets.load(file)
    fleets.require_sizes(spec)
    return predict_fleet(spec, fleets.replicas_of(spec, model, workload_fields(model, "serve", given)))


def plan_fleets(
    files: Sequence[Path], model: str, task: str, given: Given, goal: str, slo: Mapping[str, float],
    others: Mapping[str, object], out: Path | None, json: bool,
) -> None:  # fmt: skip
    """Size the fleets of ``files`` for the limits and print them, the best first. Exit code 1 when none keeps them."""
    import json as js

    from ridgeline import fleets
    from ridgeline.report import console
    from ridgeline.search.fleet_size import size_fleet
    from ridgeline.spec.errors import UserError

    _refuse(task, others)
    if goal not in ("cost", "power"):
        raise UserError(f"a fleet cannot be sized for {goal!r}", "goals: cost, power")
    fields = workload_fields(model, "serve", given)
    specs = {file: fleets.load(file) for file in files}
    chosen: Goal = "cost" if goal == "cost" else "power"
    found = {}
    with console.Status("sizing") as status:
        for file, spec in specs.items():
            status.message(f"{file}: {spec.label}")
            found[file] = size_fleet(spec, fleets.replicas_of(spec, model, fields), slo, chosen)
    price = "dollars_per_hour" if goal == "cost" else "watts"
    files = sorted(files, key=lambda f: (bool(found[f].missed), found[f].result.metric(price) or 0.0))
    kept = [f for f in files if not found[f].missed]
    folder = out or Path("runs") / f"plan-fleet-{model.replace('/', '-')}-{goal}"
    written = [fleets.write(found[f].spec, folder / f"{f.stem}.toml") for f in kept]
    if json:
        print(js.dumps([_as_dict(f, found[f]) for f in files]))
    else:
        console.print_tables(_table(files, found, goal))
        for f in (f for f in files if found[f].missed):
            print(f"{f}: no size keeps the limits: {'; '.join(found[f].missed)}")
        if written:
            say(f"wrote {', '.join(map(str, written))}")
            next_command("predict", model, "--task", "serve", "--fleet", written[0])
    if not kept:
        raise typer.Exit(1)


def _refuse(task: str, others: Mapping[str, object]) -> None:
    from ridgeline.spec.errors import UserError

    if task != "serve":
        raise UserError(f"a fleet serves, and the task is {task}", "give --task serve")
    for option in (name for name, value in others.items() if value):
        raise UserError(f"{option} does not go with --fleet", "write it in the pools of the fleet file")


def _table(files: Sequence[Path], found: Mapping[Path, Sized], goal: str) -> Any:
    from ridgeline.report.table import Column, Table
    from ridgeline.report.units import NONE, metric

    rows = []
    for f in (f for f in files if not found[f].missed):
        metrics = found[f].result.metrics
        shown = [metric(metrics[n].value, metrics[n].unit) if n in metrics else NONE for n in SHOWN]
        rows.append([f.stem, found[f].spec.label, *shown, str(found[f].tried)])
    heads = ("TTFT p50", "p99", "TPOT p50", "p99", "Throughput", "$/hour", "Power", "Simulated")
    columns = [Column("File", align="left"), Column("Fleet", align="left"), *(Column(h) for h in heads)]
    return Table(f"Smallest fleets within the limits, goal {goal}", columns, rows).without_empty_columns()


def _as_dict(file: Path, sized: Sized) -> dict[str, Any]:
    return {
        "file": str(file),
        "fleet": sized.spec.label,
        "replicas": {p.name: p.replicas for p in sized.spec.pools},
        "missed": list(sized.missed),
        "tried": sized.tried,
        "metrics": {name: m.value for name, m in sized.result.metrics.items()},
    }
