"""The command line: thin. Results go to standard output, everything else to standard error.

Exit codes: 0 done, 1 ran but no feasible answer or a threshold was broken, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ridgeline.spec.errors import UserError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from ridgeline.spec.experiment import Experiment
    from ridgeline.spec.result import Result

T = TypeVar("T")

app = typer.Typer(
    name="ridgeline",
    help="Predict, run, measure and search LLM optimisation techniques: one Plan, one result schema.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
With = Annotated[list[str] | None, typer.Option("--with", help="Switch a technique on: NAME or NAME:option=value,…")]
On = Annotated[str, typer.Option("--on", help="Cluster: NAME, 8xNAME or 4x8xNAME; `local` is this machine.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides: workload.steps=40 model.num_layers=2")]
File = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Experiment file (TOML).")]
PlanName = Annotated[str | None, typer.Option("--plan", help="Which plan of an ablation file.")]
Data = Annotated[str | None, typer.Option("--data", help="Text: a file, a directory, stdlib, or hf:NAME.")]


# ---- predict ------------------------------------------------------------------------------------------------------


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Model: catalogue name, config.json, checkpoint directory, or a TOML.")],
    on: On = "local",
    task: Annotated[str, typer.Option(help="pretrain, finetune, generate or serve.")] = "pretrain",
    with_: With = None,
    seq_len: Annotated[str | None, typer.Option(help="Tokens per sequence (training); 4k is 4096.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step over all devices.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Sequences per device and forward pass.")] = None,
    prompt_len: Annotated[str | None, typer.Option(help="Prompt tokens (generate; mean in serve).")] = None,
    output_len: Annotated[str | None, typer.Option(help="Tokens to generate (generate; mean in serve).")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second (serve).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Clients of a closed loop (serve).")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="Trace of requests, CSV or JSON lines (serve).")] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests (serve).")] = None,
    engine: Annotated[str | None, typer.Option(help="Serving software: vllm, vllm-2023, trtllm.")] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds allowed to the first token (serve).")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Seconds allowed per further token (serve).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Storage dtype of the weights: fp32, bf16, fp16.")] = None,
    plan: PlanName = None,
    trace: Annotated[Path | None, typer.Option(help="Also write the predicted step as a Chrome trace.")] = None,
    save: Annotated[bool, typer.Option(help="Keep the result in the store.")] = False,
    json: Json = False,
) -> None:
    """What will this plan give on that hardware? Exit code 1 when it does not fit."""
    from ridgeline import experiments
    from ridgeline.predict import predict as run

    if model.endswith(".toml"):
        e = _load(model, plan, [])
    else:
        given: dict[str, Any] = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "dtype": dtype}
        given |= {"rate": rate, "concurrency": concurrency, "requests": requests, "engine": engine}
        given |= {"slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "trace": str(arrivals) if arrivals else None}
        given |= {k: _length(k, v) for k, v in
                  (("seq_len", seq_len), ("prompt_len", prompt_len), ("output_len", output_len))}  # fmt: skip
        workload = {"kind": task, **{k: v for k, v in given.items() if v is not None}}
        if task in ("pretrain", "finetune") and seq_len is None:
            from ridgeline import catalog

            workload["seq_len"] = min(2048, catalog.model(model).max_positions)
        e = experiments.make(model, on, workload, with_ or [])
    result = run(e)
    if trace:
        _predicted_trace(e, trace)
    _show(result, json, save)
    if result.status == "infeasible":
        raise typer.Exit(1)


# ---- run and measure ----------------------------------------------------------------------------------------------


@app.command()
def probe(
    ranks: Annotated[int, typer.Option(help="Measure up to this many processes sharing the machine.")] = 2,
    quick: Annotated[bool, typer.Option(help="Shorter and rougher.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine (operators, memory, loopback collectives) and keep the profile as device `local`."""
    from ridgeline.measure.probe import probe as run
    from ridgeline.report.console import Status, device_table

    with Status("probing this machine") as status:
        device, file = run(max_ranks=ranks, quick=quick, progress=status.message)
    _say(f"profile kept in {file}")
    print(device.model_dump_json(indent=2)) if json else device_table(device)


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
    json: Json = False,
) -> None:
    """Train for real. Ctrl-C finishes the step and saves; the same command goes on where it stopped."""
    import os

    from ridgeline import catalog
    from ridgeline.measure.ablate import require_local
    from ridgeline.report.console import StepBar
    from ridgeline.train.launch import Job, JobFailed, run_job

    catalog.allow_unprobed()
    extra = [f'on="{procs}xlocal"'] if procs else []
    e = _load(file, plan, [*(overrides or []), *extra, *_data(data)])
    require_local(e)
    options = {"out": str(out) if out else None, "save_every": save_every, "resume": resume, "export": export}
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        _train_under_torchrun(e, options, json)
        return
    with StepBar(f"training {e.model.name}", e.training.steps) as bar:
        try:
            result = run_job(Job("train", e, options, ranks=e.world), bar.message)
        except JobFailed as failure:
            raise _failed(failure) from None
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
    json: Json = False,
) -> None:
    """Measure one experiment, with its prediction beside it."""
    from ridgeline.measure.bench import bench as run
    from ridgeline.report.console import StepBar

    e = _probed(lambda: _load(file, plan, [*(overrides or []), *_data(data)]))
    with StepBar(f"measuring {e.name or e.model.name}", 0) as bar:
        predicted, measured = run(e, repeats, bar.message)
    _store_add(predicted, measured)
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
    from ridgeline.report.console import AblationBar, print_ablation
    from ridgeline.report.html import ablation_html

    spec = _probed(lambda: experiments.load_ablation(file, [*(overrides or []), *_data(data)]))
    folder = out or Path("runs") / f"{spec.name}-{ablation_key(spec)}"
    if dry_run:
        _dry_run(spec, folder, json)
        return
    for e in spec.plans.values():
        require_local(e)
    if fresh:
        shutil.rmtree(folder / "cells", ignore_errors=True)
    try:
        with AblationBar(spec) as bar:
            outcome = run_ablation(spec, folder, _command(), bar.watch)
    except KeyboardInterrupt:
        _say(f"\ninterrupted; finished cells are kept in {folder}: give the same command again to go on")
        raise
    ablation_html(outcome, report)
    store_id = _store().add_ablation(outcome)
    print(outcome.to_json()) if json else print_ablation(outcome)
    _say(f"report: {report}   stored as {store_id}   cells in {folder}")
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

    e = _probed(lambda: _load(file, plan, [*(overrides or []), *_data(data)]))
    with Status(f"dissecting {e.name or e.model.name}") as status:
        name = e.name or e.id
        out.mkdir(parents=True, exist_ok=True)
        traces = out / f"{name}.measured.json", out / f"{name}.predicted.json"
        predicted, measured = run(e, traces[0], status.message)
    _predicted_trace(e, traces[1])
    _store_add(measured)
    print(measured.to_json()) if json else print_dissection(predicted, measured)
    _say("Chrome traces (open in Perfetto): " + ", ".join(str(t) for t in traces))


# ---- look at results ----------------------------------------------------------------------------------------------


@app.command()
def runs(
    limit: Annotated[int, typer.Option(help="Newest so many.")] = 20,
    json: Json = False,
) -> None:
    """List stored results."""
    import json as js

    from ridgeline.report.console import print_runs

    rows = _store().list(limit=limit)
    if json:
        print(js.dumps([row._asdict() for row in rows]))
    else:
        print_runs(rows)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="Stored id or result file.")],
    b: Annotated[str, typer.Argument(help="Stored id or result file.")],
    force: Annotated[bool, typer.Option(help="Compare although the environments differ.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Compare two results, metric by metric; refuses unlike environments unless --force."""
    from ridgeline.measure.compare import compare as run
    from ridgeline.report.console import print_comparison

    comparison = run(_result(a), _result(b), force=force)
    if out:
        from ridgeline.report.html import comparison_html

        comparison_html(comparison, out)
    print(comparison.model_dump_json(indent=2)) if json else print_comparison(comparison)


@app.command()
def report(
    what: Annotated[str, typer.Argument(help="Stored id, result file or ablation file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file; its suffix chooses the format.")] = None,
    format: Annotated[str | None, typer.Option(help="html, md, csv or json.")] = None,
    json: Json = False,
) -> None:
    """Write a stored result or ablation as HTML, Markdown, CSV or JSON (Markdown to standard output by default)."""
    from ridgeline.report.export import FORMATS, export

    chosen = "json" if json else format or (out.suffix.lstrip(".") if out and out.suffix else "md")
    if chosen not in FORMATS:
        raise unknown("format", chosen, FORMATS)
    text = export(_any(what), chosen, out)
    if text is not None:
        print(text)
    elif out is not None:
        _say(f"wrote {out}")


# ---- the catalogue ------------------------------------------------------------------------------------------------


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(help="Show one technique's card and options.")] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Which pairs work together, and why others do not.")] = False,
    json: Json = False,
) -> None:
    """List the techniques, show a card, or the support matrix."""
    import json as js

    from ridgeline.report import console
    from ridgeline.techniques.cards import card_table, cards
    from ridgeline.techniques.matrix import support_matrix

    if matrix:
        pairs = support_matrix()
        print(js.dumps([p.model_dump() for p in pairs], indent=2)) if json else console.print_matrix(pairs)
    elif name:
        found = {c["name"]: c for c in cards()}
        if name not in found:
            raise unknown("technique", name, found)
        print(js.dumps(found[name], indent=2)) if json else print(card_table(found[name]))
    else:
        print(js.dumps(cards(), indent=2)) if json else console.print_cards(cards())


@app.command()
def models(name: Annotated[str | None, typer.Argument()] = None, json: Json = False) -> None:
    """List the catalogue's models, or show one."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report.console import print_models

    found = [catalog.model(n) for n in ([name] if name else catalog.models())]
    rows = [{**m.model_dump(exclude_none=True), "parameters": m.num_parameters,
             "active_parameters": m.num_active_parameters} for m in found]  # fmt: skip
    if json:
        print(js.dumps(rows[0] if name else rows, indent=2))
    else:
        print_models(rows, detail=name is not None)


@app.command()
def devices(name: Annotated[str | None, typer.Argument()] = None, json: Json = False) -> None:
    """List the catalogue's devices (and `local`, once probed), or show one."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report.console import print_devices

    found = [catalog.device(n) for n in ([name] if name else catalog.devices())]
    rows = [d.model_dump(mode="json", exclude_none=True) for d in found]
    if json:
        print(js.dumps(rows[0] if name else rows, indent=2))
    else:
        print_devices(found, detail=name is not None)


# ---- helpers ------------------------------------------------------------------------------------------------------


def _predicted_trace(e: Experiment, path: Path) -> None:
    from ridgeline.predict import predict_trace
    from ridgeline.report.trace import TraceEvent, write_trace

    events = [
        TraceEvent(v.name, v.start, v.seconds, v.stream, "predicted", {"phase": v.phase}) for v in predict_trace(e)
    ]
    write_trace(path, events)


def _load(file: str, plan: str | None, overrides: list[str]) -> Experiment:
    from ridgeline import experiments

    if plan:
        return experiments.load_plan(file, plan, overrides)
    return experiments.load(file, overrides)


def _data(data: str | None) -> list[str]:
    return [f"workload.data={data}"] if data else []


def _length(name: str, text: str | None) -> int | None:
    from ridgeline.spec.plan import scalar

    if text is None:
        return None
    value = scalar(text)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"--{name.replace('_', '-')} {text!r} is not a whole number", "write 4096 or 4k")
    return value


def _show(result: Result, json: bool, save: bool) -> None:
    if save:
        _say(f"stored as {_store().add_result(result)}")
    if json:
        print(result.to_json())
    else:
        from ridgeline.report.console import print_result

        print_result(result)


def _store() -> Any:
    from ridgeline.store import Store

    return Store()


def _store_add(*results: Result) -> None:
    store = _store()
    ids = [store.add_result(r) for r in results]
    _say("stored as " + ", ".join(ids))


def _any(what: str) -> Any:
    from ridgeline.report.export import load_any

    path = Path(what)
    return load_any(path) if path.is_file() else _store().get(what)


def _result(what: str) -> Result:
    from ridgeline.spec.result import Result

    found = _any(what)
    if not isinstance(found, Result):
        raise UserError(f"{what} is an ablation, not one result", "compare two results; `ridgeline runs` lists them")
    return found


def _probed(load: Callable[[], T]) -> T:
    """``load()``; when it needs the profile of this machine and there is none, probe once and load again."""
    from ridgeline import catalog

    try:
        return load()
    except catalog.NoProfile:
        from ridgeline.measure.probe import probe as run
        from ridgeline.report.console import Status

        with Status("probing this machine once (its profile is kept)") as status:
            run(max_ranks=2, quick=False, progress=status.message)
        return load()


def _dry_run(spec: Any, folder: Path, json: bool) -> None:
    import json as js

    from ridgeline.predict import predict as run
    from ridgeline.report.console import print_plan_predictions

    rows = [(name, run(e)) for name, e in spec.plans.items()]
    if json:
        print(js.dumps({name: js.loads(r.to_json()) for name, r in rows}))
    else:
        print_plan_predictions(rows, spec.measure.repeats, folder)


def _train_under_torchrun(e: Experiment, options: dict[str, Any], json: bool) -> None:
    import os

    from ridgeline.train.worker import run_rank, setup

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if e.world != ranks:
        raise UserError(f"torchrun started {ranks} ranks, the experiment has {e.world}", f'set on="{ranks}xlocal"')

    def progress(message: dict[str, Any]) -> None:
        if rank == 0 and "loss" in message:
            _say(f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}")

    code = 0
    try:
        result = run_rank("train", e, options, setup(ranks), rank, ranks, progress)
        if rank == 0:
            _print_training(result, json)
        code = 130 if result["stopped"] else 0
    except UserError as error:
        _say(f"rank {rank}: error: {error}")
        code = 2
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


def _failed(failure: Any) -> Exception:
    if failure.log:
        _say(failure.log)
    _say(f"the run failed ({failure.status}): {failure.reason}")
    return typer.Exit(1)


def _command() -> str:
    import shlex

    return " ".join(shlex.quote(a) for a in ["ridgeline", *sys.argv[1:]])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point: turns mistakes into one message and exit code 2, Ctrl-C into 130."""
    try:
        app()
    except UserError as e:
        _say(f"error: {e}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
