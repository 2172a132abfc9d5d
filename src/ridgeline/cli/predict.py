"""`ridgeline predict`: the performance of a plan, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import Json, On, PlanName, With, app, predicted_trace, say, store
from ridgeline.cli.workload_options import (
    Given,
    Model,
    Task,
    experiment_from_options,
    workload_fields,
    workload_options,
)

if TYPE_CHECKING:
    from ridgeline.spec.result import Result


@app.command()
@workload_options
def predict(
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
    from ridgeline.report.console import print_result

    if fleet:
        result = _of_fleet(fleet, model, task, given, {"--on": on != "local", "--with": with_, "--plan": plan,
                                                       "--trace": trace})  # fmt: skip
    else:
        e = experiment_from_options(model, on, task, with_, plan, given)
        result = run(e)
        if trace:
            predicted_trace(e, trace)
    if save:
        say(f"stored as {store().add_result(result)}")
    print(result.to_json()) if json else print_result(result)
    if result.status == "infeasible":
        raise typer.Exit(1)


def _of_fleet(file: Path, model: str, task: str, given: Given, others: dict[str, object]) -> Result:
    """The prediction of a fleet file."""
    from ridgeline import fleets
    from ridgeline.predict.fleet.predict_fleet import predict_fleet
    from ridgeline.spec.errors import UserError

    if task != "serve":
        raise UserError(f"a fleet serves, and the task is {task}", "give --task serve")
    for option in (name for name, value in others.items() if value):
        raise UserError(f"{option} does not go with --fleet", "write it in the pools of the fleet file")
    spec = fleets.load(file)
    fleets.require_sizes(spec)
    return predict_fleet(spec, fleets.replicas_of(spec, model, workload_fields(model, "serve", given)))
