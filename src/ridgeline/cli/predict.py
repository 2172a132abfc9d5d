"""`ridgeline predict`: the performance of a plan, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import Json, On, PlanName, With, app, predicted_trace, say, store
from ridgeline.cli.workload_options import (
    Given,
    Model,
    Task,
    experiment_from_options,
    workload_options,
)


@app.command()
@workload_options
def predict(
    ctx: typer.Context,
    model: Model,
    on: On = "local",
    task: Task = "pretrain",
    with_: With = None,
    *,
    given: Given,
    plan: PlanName = None,
    trace: Annotated[Path | None, typer.Option(help="Also write the predicted step as a Chrome trace.")] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file (TOML): pools of replicas behind a router (serve); instead of --on.")
    ] = None,
    save: Annotated[bool, typer.Option(help="Store the result.")] = False,
    json: Json = False,
) -> None:
    """What will this plan give on that hardware? Exit code 1 when it does not fit."""
    from ridgeline.predict import predict as run
    from ridgeline.predict import without_effect
    from ridgeline.report.console import print_result

    if fleet:
        from ridgeline.cli.fleet_plan import predicted_fleet

        others = {"--on": on != "local", "--with": with_, "--plan": plan, "--trace": trace}
        result = predicted_fleet(fleet, model, task, given, others)
    else:
        e = experiment_from_options(ctx, model, on, task, with_, plan, given)
        result = run(e)
        if same := without_effect(e):
            result.notes.append(f"leaving out any one of these changes no predicted metric: {', '.join(same)}")
        if trace:
            predicted_trace(e, trace)
    if save:
        say(f"stored as {store().add_result(result)}")
    print(result.to_json()) if json else print_result(result)
    if result.status == "infeasible":
        raise typer.Exit(1)
