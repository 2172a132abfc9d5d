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
    file = tables.write_plan(found, out or Path("runs") / f"plan-{q.model.name.replace('/', '-')}-{q.cluster.label}")
    if json:
        print(js.dumps(tables.as_dict(found, q)))
        return
    console.print_tables(*tables.tables(found, q))
    say(f"wrote {file}")
    next_command("predict", file)
