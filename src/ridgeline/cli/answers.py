"""Questions answered without running anything: predict, and what its numbers rest on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, On, PlanName, With, app, load, predicted_trace, say, store
from ridgeline.cli.workload_options import Given, workload_options

if TYPE_CHECKING:
    from ridgeline.spec.experiment import Experiment
    from ridgeline.spec.result import Result


# ---- predict ------------------------------------------------------------------------------------------------------


Model = Annotated[str, typer.Argument(help="Model: catalogue name, config.json, checkpoint directory, or a TOML.")]
Task = Annotated[str, typer.Option(help="pretrain, finetune, generate or serve.")]


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
    save: Annotated[bool, typer.Option(help="Keep the result in the store.")] = False,
    json: Json = False,
) -> None:
    """What will this plan give on that hardware? Exit code 1 when it does not fit."""
    from ridgeline.predict import predict as run

    e = _experiment(model, on, with_, plan, _workload(model, task, given, on, with_))
    result = run(e)
    if trace:
        predicted_trace(e, trace)
    _show(result, json, save)
    if result.status == "infeasible":
        raise typer.Exit(1)


@app.command()
@workload_options
def explain(
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
    from ridgeline.report.explanation import as_dict, print_explanation

    found = run(_experiment(model, on, with_, plan, _workload(model, task, given, on, with_)))
    print(js.dumps(as_dict(found))) if json else print_explanation(found)


def _experiment(model: str, on: str, with_: list[str] | None, plan: str | None, workload: dict[str, Any]) -> Experiment:
    """The experiment of the options, or of a file."""
    from ridgeline import experiments

    if model.endswith(".toml"):
        return load(model, plan, [])
    return experiments.make(model, on, workload, with_ or [])


def _workload(model: str, task: str, given: Given, on: str = "", with_: list[str] | None = None) -> Given:
    """The workload's fields among a command's options; training defaults to 2048 tokens where the model has them.

    A system on its paper's own model and cluster defaults to the paper's workload.
    """
    from ridgeline import experiments

    fields = {k: v for k, v in given.items() if v is not None}
    if not model.endswith(".toml"):
        fields = {**experiments.reported_workload(model, on, task, with_ or []), **fields}
    if task in ("pretrain", "finetune") and "seq_len" not in fields and not model.endswith(".toml"):
        from ridgeline import catalog

        fields["seq_len"] = min(2048, catalog.model(model).max_positions)
    return {"kind": task, **fields}


@app.command()
def probe(
    ranks: Annotated[int, typer.Option(help="Measure up to this many processes sharing the machine.")] = 2,
    quick: Annotated[bool, typer.Option(help="Shorter and rougher.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine (operators, memory, loopback collectives) and keep the profile as device `local`."""
    from ridgeline.measure.probing.probe import probe as run
    from ridgeline.report.console import Status, device_table

    with Status("probing this machine") as status:
        device, file = run(max_ranks=ranks, quick=quick, progress=status.message)
    say(f"profile kept in {file}")
    print(device.model_dump_json(indent=2)) if json else device_table(device)


def _show(result: Result, json: bool, save: bool) -> None:
    if save:
        say(f"stored as {store().add_result(result)}")
    if json:
        print(result.to_json())
    else:
        from ridgeline.report.console import print_result

        print_result(result)


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(metavar="DIR_OR_CSV", help="Measured data: a CSV file, or a directory.")],
    plot: Annotated[Path | None, typer.Option(help="Also write a page of measured-against-predicted pictures.")] = None,
    json: Json = False,
) -> None:
    """How far are predictions from measurements? Judges every row of the files, beside a trivial baseline."""
    import json as js

    from ridgeline.report import console, validation
    from ridgeline.validate.run import run

    with console.Status(f"validating {path.name}") as status:
        report = run(path, lambda file, at, rows: status.progress.update(status.task, note=f"{file} {at}/{rows}"))
    if plot:
        validation.validation_html(report, plot)
        say(f"wrote {plot}")
    if json:
        print(js.dumps(report.as_dict()))
    else:
        tables = [validation.score_table(report), validation.regret_table(report), validation.worst_table(report)]
        console.print_tables(*(t for t in tables if t is not None))
        for line in validation.skipped_lines(report):
            say(line)
    if not report.judged:
        say("no row could be judged")
        raise typer.Exit(1)


@app.command()
@workload_options
def plan(
    model: Annotated[str, typer.Argument(help="Model: catalogue name, config.json or checkpoint directory.")],
    on: On = "local",
    task: Task = "pretrain",
    goal: Annotated[str, typer.Option(help="throughput, latency, cost or memory.")] = "throughput",
    slo: Annotated[list[str] | None, typer.Option(help="A limit: METRIC=VALUE, e.g. tpot_s=50ms. Repeatable.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Only these techniques. Repeatable.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="Never this technique. Repeatable.")] = None,
    *,
    given: Given,
    out: Annotated[Path | None, typer.Option(help="Directory for the plans as files (default runs/plan-…).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that search.")] = 2,
    json: Json = False,
) -> None:
    """Which plan is best for this model, cluster and goal, and what stops the others? Exit code 1 when none fits."""
    import json as js

    from ridgeline import catalog, experiments
    from ridgeline.report import console, planning
    from ridgeline.search import Question, search
    from ridgeline.search.question import parse_slo
    from ridgeline.search.why import closest_miss, relaxations, why_not

    cluster = catalog.cluster(on)
    fields = _workload(model, task, given)
    if task in ("pretrain", "finetune"):  # throughput needs one batch size for all layouts
        fields.setdefault("batch_size", 4 * cluster.size)
    e = experiments.make(model, on, fields, [])
    question = Question(
        e.model, e.cluster, e.workload, goal, parse_slo(slo or []), frozenset(allow or ()), frozenset(forbid or ()),
        free_batch=task == "generate" and "batch_size" not in fields, free_micro_batch="micro_batch_size" not in fields,
    )  # fmt: skip
    with console.StepBar(f"planning {e.model.name} on {cluster.label}", 0) as bar:
        answer = search(question, workers, lambda at, of: bar.progress.update(bar.task, completed=at, total=of))
    reasons, miss, ways = why_not(answer), None, []
    if not answer.best:
        miss, ways = closest_miss(answer), relaxations(answer)
    folder = out or Path("runs") / f"plan-{e.model.name.replace('/', '-')}-{cluster.label}-{goal}"
    files = planning.write_plans(answer, folder)
    if json:
        print(js.dumps(planning.as_dict(answer, reasons, ways, miss)))
    elif answer.best:
        console.print_tables(*planning.answer_tables(answer))
        print("Why not the others\n" + "\n".join(f"  {w}" for w in reasons))
        say(f"wrote {', '.join(map(str, files))}: each runs with `ridgeline predict FILE`")
    else:
        print(f"no feasible plan among {answer.found.counts['considered']} candidates")
        print("\n".join(f"  {w}" for w in reasons))
        if miss:
            print(f"closest miss: {' '.join(miss[0].experiment.plan.strings())}: {miss[1]}")
        print("smallest relaxations:" if ways else "no single relaxation was found")
        print("\n".join(f"  {r.change}: {' '.join(r.plan) or '(no technique)'}" for r in ways))
    if not answer.best:
        raise typer.Exit(1)


@app.command()
def calibrate(
    paths: Annotated[list[Path], typer.Argument(metavar="CSV_OR_DIR...", help="Measured operators (see validate).")],
    device: Annotated[str, typer.Option(help="Whose rows to fit: a catalogue name, an alias, or a device TOML.")],
    out: Annotated[Path | None, typer.Option(help="Write the profile there; default: under its name, for all.")] = None,
    json: Json = False,
) -> None:
    """Fit a device's constants to measured operators, and keep them as its profile from now on."""
    import json as js

    from ridgeline import catalog
    from ridgeline.predict.calibrate import calibrate as fit
    from ridgeline.report import console
    from ridgeline.report.files import write_atomic
    from ridgeline.validate.samples import samples

    known = catalog.device(device)
    with console.Status(f"calibrating {known.name}") as status:
        status.message("reading")
        rows, skipped = samples(paths, known.name)
        status.message(f"fitting {len(rows)} rows")
        result = fit(rows, known)
    profile = result.on(known).model_copy(update={"source": f"{known.source}\nCalibrated on {len(rows)} rows."})
    where = write_atomic(out, catalog.device_toml(profile)) if out else catalog.save_device(profile)
    if json:
        fits = [{"family": f.family, "rows": f.rows, "before": f.before, "after": f.after} for f in result.fits]
        print(js.dumps({"device": known.name, "profile": str(where), "fits": fits, "skipped": len(skipped)}))
    else:
        console.print_fits(known.name, result.fits)
    for skip in skipped[:5]:
        say(f"skipped line {skip.line}: {skip.reason}")
    if len(skipped) > 5:
        say(f"{len(skipped)} rows skipped in all")
    say(f"profile kept in {where}")
    if not result.fits:
        say("too few rows of any family to fit: the constants are as they were")
        raise typer.Exit(1)
