"""Commands that run the plan on this machine: train, bench, ablate, dissect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import (
    Data,
    File,
    Json,
    Overrides,
    PlanName,
    app,
    data_override,
    keep,
    load,
    number_of_bytes,
    predicted_trace,
    probed,
    say,
    store,
)

if TYPE_CHECKING:
    from ridgeline.jobs.restart import Launch
    from ridgeline.spec.experiment import Experiment
    from ridgeline.spec.result import Result

Backend = Annotated[str, typer.Option(help="The engine: native, hf or deepspeed.")]


# ---- run and measure ----------------------------------------------------------------------------------------------


@app.command()
def train(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    procs: Annotated[int | None, typer.Option(help="Processes on this machine.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for checkpoints and the exported model.")] = None,
    save_every: Annotated[int, typer.Option(help="Checkpoint every so many steps (with --out).")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out.")] = True,
    export: Annotated[bool, typer.Option(help="Write a Hugging Face checkpoint at the end (with --out).")] = True,
    device_memory: Annotated[
        str | None, typer.Option(help="Most memory that each rank's device may use: 600MB, 1.5GiB, …")
    ] = None,
    backend: Backend = "native",
    launcher: Annotated[str, typer.Option(help="What starts the processes: local or ray.")] = "local",
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds that a rank waits for the others (default 300).")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Starts again from the last checkpoint when a rank is lost (default: 3 on Ray)."),
    ] = None,
    json: Json = False,
) -> None:
    """Train for real. Ctrl-C finishes the step and saves; the same command goes on where it stopped."""
    from ridgeline import catalog
    from ridgeline.jobs.launchers import launched, launcher_of
    from ridgeline.jobs.restart import restarts
    from ridgeline.measure.ablate import require_local
    from ridgeline.measure.backends import require

    catalog.allow_unprobed()
    extra = [f'on="{procs}xlocal"'] if procs else []
    e = load(file, plan, [*(overrides or []), *extra, *data_override(data)])
    start, default = launcher_of(launcher)
    require_local(e, launched() or launcher != "local", backend)
    options = {"out": str(out) if out else None, "save_every": save_every, "resume": resume,
               "export": str(out / "model") if out and export else None,
               "device_memory": number_of_bytes("--device-memory", device_memory), "timeout": timeout,
               "backend": backend}  # fmt: skip
    require(backend, e, options)
    most = restarts(max_restarts, options, default)
    if launched():
        _train_under_torchrun(e, options, json)
        return
    result = run_training(e, options, f"training {e.model.name}", start, most)
    _print_training(result, json)
    if result["stopped"]:
        raise typer.Exit(130)


@app.command()
def bench(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes to measure.")] = 3,
    backend: Backend = "native",
    json: Json = False,
) -> None:
    """Measure one experiment, with its prediction beside it."""
    from ridgeline.measure.bench import bench as run
    from ridgeline.report.console import StepBar

    e = probed(lambda: load(file, plan, [*(overrides or []), *data_override(data)]))
    with StepBar(f"measuring {e.name or e.model.name}", 0) as bar:
        predicted, measured = run(e, repeats, bar.message, backend)
    keep(predicted, measured)
    if json:
        print(measured.to_json())
    else:
        from ridgeline.report.console import print_pair

        print_pair(predicted, measured)
    if measured.status != "ok":
        raise typer.Exit(1)


@app.command()
def ablate(
    file: File,
    overrides: Overrides = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Directory of cells and results (default runs/NAME-ID).")] = None,
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("report.html"),
    fresh: Annotated[bool, typer.Option(help="Measure again what an earlier run already measured.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would be measured, with predictions, and stop.")] = False,
    json: Json = False,
) -> None:
    """Which techniques help, by how much, and why? Every plan predicted and measured, against the baseline.

    An interrupted ablation goes on where it stopped when the same command is given again.
    """
    import shutil

    from ridgeline import experiments
    from ridgeline.measure.ablate import ablation_key, require_local, run_ablation
    from ridgeline.report.console import AblationBar, print_ablation, print_plan_predictions
    from ridgeline.report.html import ablation_html

    spec = probed(lambda: experiments.load_ablation(file, [*(overrides or []), *data_override(data)]))
    folder = out or Path("runs") / f"{spec.name}-{ablation_key(spec)}"
    if dry_run:
        _dry_run(spec, folder, json)
        return
    for e in spec.plans.values():
        require_local(e)
    if fresh:
        shutil.rmtree(folder / "cells", ignore_errors=True)

    def announce(predicted: dict[str, Result]) -> None:
        if not json:
            note = f"each is measured now, in {spec.measure.repeats} processes; finished ones are kept in {folder}"
            print_plan_predictions(list(predicted.items()), "predicted", note)

    try:
        with AblationBar(spec) as bar:
            outcome = run_ablation(spec, folder, command_line(), bar.watch, announce)
    except KeyboardInterrupt:
        say(f"\ninterrupted; finished cells are kept in {folder}: give the same command again to go on")
        raise
    ablation_html(outcome, report)
    store_id = store().add_ablation(outcome)
    print(outcome.to_json()) if json else print_ablation(outcome)
    say(f"report: {report}   stored as {store_id}   cells in {folder}")
    if all(o.verdict == "failed" for o in outcome.outcomes):
        raise typer.Exit(1)


@app.command()
def dissect(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Directory for the traces.")] = Path("runs/dissect"),
    json: Json = False,
) -> None:
    """Where do the time and the bytes go, module by module, phase by phase, operator by operator?"""
    from ridgeline.measure.bench import dissect as run
    from ridgeline.report.console import Status, print_dissection

    e = probed(lambda: load(file, plan, [*(overrides or []), *data_override(data)]))
    with Status(f"dissecting {e.name or e.model.name}") as status:
        name = e.name or e.id
        out.mkdir(parents=True, exist_ok=True)
        traces = out / f"{name}.measured.json", out / f"{name}.predicted.json"
        predicted, measured = run(e, traces[0], status.message)
    predicted_trace(e, traces[1])
    keep(measured)
    print(measured.to_json()) if json else print_dissection(predicted, measured)
    say("Chrome traces (open in Perfetto): " + ", ".join(str(t) for t in traces))


def run_training(
    e: Experiment, options: dict[str, Any], title: str, start: Launch | None = None, restarts: int = 0
) -> dict[str, Any]:
    """The result of a training job in processes of its own, under a progress bar. ``start``: what launches them, None:
    this machine."""
    from ridgeline.jobs.launch import Job, JobFailed, run_job
    from ridgeline.jobs.restart import run_with_restarts
    from ridgeline.report.console import StepBar

    with StepBar(title, e.training.steps) as bar:
        try:
            return run_with_restarts(start or run_job, Job("train", e, options, ranks=e.world), bar.message, restarts)
        except JobFailed as failure:
            raise failed(failure) from None


def _dry_run(spec: Any, folder: Path, json: bool) -> None:
    import json as js

    from ridgeline.predict import predict as run
    from ridgeline.report.console import print_plan_predictions

    rows = [(name, run(e)) for name, e in spec.plans.items()]
    if json:
        print(js.dumps({name: js.loads(r.to_json()) for name, r in rows}))
    else:
        note = f"{len(rows)} plans × {spec.measure.repeats} processes; cells would go to {folder}"
        print_plan_predictions(rows, "predicted (nothing was measured)", note)


def _train_under_torchrun(e: Experiment, options: dict[str, Any], json: bool) -> None:
    import os

    from ridgeline.jobs.launchers import run_launched_rank

    def progress(message: dict[str, Any]) -> None:
        if "loss" in message:
            say(f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}")

    result, code, said = run_launched_rank(e, options, progress)
    if said:
        say(said)
    if result is not None:
        _print_training(result, json)
    sys.stdout.flush()
    os._exit(code)  # a rank whose peers are gone may hang in library destructors


def _print_training(result: dict[str, Any], json: bool) -> None:
    import json as js

    if json:
        print(js.dumps(result))
        return
    losses = result["losses"]
    line = f"{result['step']} steps, loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else "nothing to do"
    print(line + (f"; checkpoint {result['checkpoint']}" if result["checkpoint"] else ""))
    if result["device_peak_bytes"]:
        print(f"device memory: {result['device_peak_bytes'] / 1e6:.1f} MB at most")
    for name, t in result["traffic"].items():
        print(f"{name}: {t['bytes'] / 1e6:.1f} MB in {t['count']} moves at {t['bandwidth'] / 1e9:.2f} GB/s")


def failed(failure: Any) -> Exception:
    """What to raise for a job that failed, after its log and reason are said."""
    if failure.log:
        say(failure.log)
    say(f"the run failed ({failure.status}): {failure.reason}")
    return typer.Exit(1)


def command_line() -> str:
    """How Ridgeline was started, to paste into a shell."""
    import shlex

    return " ".join(shlex.quote(a) for a in ["ridgeline", *sys.argv[1:]])
