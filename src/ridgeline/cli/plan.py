"""`ridgeline plan`: the best plan for a model, a cluster and a goal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import Json, On, app, next_command, say
from ridgeline.cli.workload_options import Given, Task, workload_fields, workload_options


@app.command()
@workload_options
def plan(
    model: Annotated[str, typer.Argument(help="Model: catalog name, config.json or checkpoint directory.")],
    on: On = "local",
    task: Task = "pretrain",
    goal: Annotated[
        str | None,
        typer.Option(help="What to optimize: throughput (default), latency, cost, memory; of a fleet cost or power."),
    ] = None,
    slo: Annotated[list[str] | None, typer.Option(help="A limit: METRIC=VALUE, e.g. tpot_s=50ms. Repeatable.")] = None,
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="Have this technique or system in every plan. Repeatable.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Also consider this technique, though it changes quality (adapters, bits, …). Repeatable."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Consider no techniques but these. Repeatable.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="Exclude this technique. Repeatable.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Search strategies of single operators and stages: alpa, flexflow, greedy or random (pretrain)."
        ),
    ] = None,
    running: Annotated[
        Path | None,
        typer.Option(help="Experiment file of a run whose cluster has changed to --on: plan the rest of it."),
    ] = None,
    lost: Annotated[
        list[int] | None,
        typer.Option(help="With --running: a rank whose device is gone (default: the last). Repeatable."),
    ] = None,
    steps_left: Annotated[int, typer.Option(min=1, help="With --running: steps that are left of the run.")] = 1000,
    fleet: Annotated[
        list[Path] | None,
        typer.Option(help="Fleet file whose pools without `replicas` are sized for the limits (serve). Repeatable."),
    ] = None,
    *,
    given: Given,
    out: Annotated[Path | None, typer.Option(help="Directory for the plan files (default runs/plan-…).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of search processes.")] = 2,
    json: Json = False,
) -> None:
    """Which plan is best for this model, cluster and goal, and what stops the others? Exit code 1 when none fits."""
    import json as js

    from ridgeline import catalog, experiments
    from ridgeline.report import console
    from ridgeline.search import Question, answer_tables, search
    from ridgeline.search.question import parse_slo
    from ridgeline.search.why import closest_miss, relaxations, why_not
    from ridgeline.spec.device import Cluster
    from ridgeline.techniques.registry import brief

    if fleet:
        from ridgeline.cli.fleet_plan import plan_fleets

        others = {
            "--method": method,
            "--on": on != "local",
            "--with": with_,
            "--allow": allow,
            "--only": only,
            "--forbid": forbid,
        }
        plan_fleets(fleet, model, task, given, goal or "cost", parse_slo(slo or []), others, out, json)
        return
    if running:
        from ridgeline.cli.plan_auto import plan_again

        plan_again(running, on, lost or [], steps_left, method or "alpa", out, workers, json)
        return
    goal = goal or "throughput"
    spec = catalog.model(model)  # what is no model is said first, on machines without a profile too
    cluster = catalog.cluster(on)
    fields = workload_fields(model, task, given)
    trains = task in ("pretrain", "finetune")
    # A plan that divides the model has fewer replicas than devices, which need not divide the batch.
    e = experiments.make(spec, Cluster(device=cluster.device) if trains else cluster, fields, [])
    question = Question(
        e.model, cluster, e.workload, goal, parse_slo(slo or []), experiments.plan_of(with_ or [], "--with"),
        frozenset(allow or ()), frozenset(only or ()), frozenset(forbid or ()),
        free_batch=task == "generate" and "batch_size" not in fields, free_micro_batch="micro_batch_size" not in fields,
    )  # fmt: skip
    if method:
        from ridgeline.cli.plan_auto import plan_automatically

        plan_automatically(question, method, out, workers, json)
        return
    with console.SearchBar(f"planning {e.model.name} on {cluster.label}") as bar:
        answer = search(question, workers, bar.at)
    reasons, miss, ways = why_not(answer), None, []
    if not answer.best:
        miss, ways = closest_miss(answer), relaxations(answer)
    folder = out or Path("runs") / f"plan-{e.model.name.replace('/', '-')}-{cluster.label.replace('+', '-')}-{goal}"
    files = answer_tables.write_plans(answer, folder)
    if json:
        print(js.dumps(answer_tables.as_dict(answer, reasons, ways, miss)))
    elif answer.best:
        console.print_tables(*answer_tables.answer_tables(answer))
        print("Why not the others\n" + "\n".join(f"  {w}" for w in reasons))
        say(f"wrote {', '.join(map(str, files))}")
        next_command("predict", files[0])
    else:
        print(f"no feasible plan among {answer.found.counts['considered']} candidates")
        print("\n".join(f"  {line}" for line in [*answer_tables.load(answer.question.workload), *reasons]))
        if miss:
            print(f"closest miss: {' '.join(brief(miss[0].experiment.plan))}: {miss[1]}")
        else:  # none was predicted
            print("refused:")
            print("\n".join(f"  {n} plans: {why.splitlines()[0]}" for why, n in answer.found.refusals.most_common(3)))
        print("smallest relaxations:" if ways else "no single relaxation was found")
        print("\n".join(f"  {r.change}: {' '.join(r.plan) or '(no technique)'}" for r in ways))
    if not answer.best:
        raise typer.Exit(1)
