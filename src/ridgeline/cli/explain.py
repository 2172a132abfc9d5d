"""`ridgeline explain`: where a predicted number comes from."""

from __future__ import annotations

import typer

from ridgeline.cli.base import Json, On, PlanName, With, app
from ridgeline.cli.workload_options import Given, Model, Task, experiment_from_options, workload_options


@app.command()
@workload_options
def explain(
    ctx: typer.Context,
    model: Model,
    on: On = "local",
    task: Task = "pretrain",
    with_: With = None,
    *,
    given: Given,
    plan: PlanName = None,
    json: Json = False,
) -> None:
    """Why this number? The predicted time as a tree with each part's bound, and what would have to change to gain."""
    import json as js

    from ridgeline.predict.explain import explain as run
    from ridgeline.predict.explanation_text import as_dict, print_explanation

    found = run(experiment_from_options(ctx, model, on, task, with_, plan, given))
    print(js.dumps(as_dict(found))) if json else print_explanation(found)
    if found.result.status == "infeasible":
        raise typer.Exit(1)
