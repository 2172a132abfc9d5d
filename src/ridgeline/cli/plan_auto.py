"""`--method` of `ridgeline plan`: automatic parallelization."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ridgeline.cli.base import next_command, say

if TYPE_CHECKING:
    from ridgeline.search import Question


def plan_automatically(question: Question, method: str, out: Path | None, workers: int, json: bool) -> None:
    """Print the plan that ``method`` finds and write it as an experiment file. Exit code 1 when it finds none."""
    import json as js

    from ridgeline.report import console
    from ridgeline.search.auto import tables
    from ridgeline.search.auto.auto_parallel import auto_parallel

    q = question
    with console.StepBar(f"{method}: {q.model.name} on {q.cluster.label}", 0) as bar:
        found = auto_parallel(q, method, workers, lambda at, of: bar.progress.update(bar.task, completed=at, total=of))
    if found is None:
        print(f"{method} found no plan that fits")
        raise typer.Exit(1)
    file = tables.write_plan(found, out or _folder(q.model.name, q.cluster.label))
    if json:
        print(js.dumps(tables.as_dict(found, q)))
        return
    console.print_tables(*tables.tables(found, q))
    say(f"wrote {file}")
    next_command("predict", file)


def plan_again(
    file: Path, on: str, lost: list[int], steps_left: int, method: str, out: Path | None, workers: int, json: bool
) -> None:
    """Print the plan for the rest of a run on a changed cluster, and whether to change over. Exit code 1 when none
    fits."""
    import json as js

    from ridgeline import catalog, experiments
    from ridgeline.report import console
    from ridgeline.search.auto import tables
    from ridgeline.search.auto.replan import replan

    running, cluster = experiments.load(file), catalog.cluster(on)
    with console.StepBar(f"{method}: {running.model.name} on {cluster.label}", 0) as bar:
        found = replan(running, cluster, steps_left, lost, method, workers,
                       lambda at, of: bar.progress.update(bar.task, completed=at, total=of))  # fmt: skip
    if found is None:
        print(f"{method} found no plan that fits")
        raise typer.Exit(1)
    written = tables.write_plan(found.found, out or _folder(running.model.name, cluster.label))
    if json:
        print(js.dumps(tables.replan_dict(found)))
        return
    console.print_tables(*tables.replan_tables(found))
    say(f"wrote {written}")


def _folder(model: str, on: str) -> Path:
    return Path("runs") / f"plan-{model.replace('/', '-')}-{on.replace('+', '-')}"
