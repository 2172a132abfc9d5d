"""`ridgeline train`: train the model of an experiment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ridgeline.cli.base import (
    Backend,
    Data,
    File,
    Json,
    Overrides,
    PlanName,
    app,
    data_override,
    load,
    next_command,
    number_of_bytes,
    require_writable,
    say,
)
from ridgeline.cli.jobs import require_saves, run_training

if TYPE_CHECKING:
    from ridgeline.jobs.job import TrainOptions
    from ridgeline.spec.experiment import Experiment


@app.command()
def train(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    data: Data = None,
    procs: Annotated[int | None, typer.Option(help="Number of processes on this machine.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for checkpoints and the exported model.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints (with --out).")] = 0,
    async_save: Annotated[
        bool, typer.Option(help="Write checkpoints while training goes on; each rank's host memory holds its part.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Resume from the newest checkpoint in --out.")] = True,
    export: Annotated[bool, typer.Option(help="Write a Hugging Face checkpoint at the end (with --out).")] = True,
    device_memory: Annotated[str | None, typer.Option(help="Memory limit per device: 600MB, 1.5GiB, …")] = None,
    backend: Backend = "native",
    launcher: Annotated[str, typer.Option(help="Process launcher: local or ray.")] = "local",
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Timeout of collectives in seconds (default 300).")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum restarts in a row after a rank is lost (default: 3 on Ray and for elastic plans)."
        ),
    ] = None,
    memory_dir: Annotated[
        Path | None, typer.Option(help="Directory in memory for the copies of an elastic plan (default /dev/shm).")
    ] = None,
    json: Json = False,
) -> None:
    """Train. Ctrl-C or SIGTERM finishes the step and saves; the same command resumes."""
    from ridgeline import catalog
    from ridgeline.jobs.job import TrainOptions
    from ridgeline.jobs.launchers import launched, launcher_of, resized
    from ridgeline.jobs.restart import restarts
    from ridgeline.measure.ablate import require_local
    from ridgeline.measure.backends import require
    from ridgeline.techniques.registry import copies_every

    catalog.allow_unprobed()
    extra = [*(overrides or []), *([f'on="{procs}xlocal"'] if procs else []), *data_override(data)]
    e = load(file, plan, extra)
    copied, name = bool(copies_every(e.plan)), e.id  # of all numbers of machines
    if copied and launched():
        e = load(file, plan, [*extra, *resized(e)])
    start, default = launcher_of(launcher)
    require_local(e, launched() or launcher != "local", backend)
    require_saves(async_save, save_every if out else 0)
    require_writable("--out", out)
    options = TrainOptions(
        out=str(out) if out else None, save_every=save_every, async_save=async_save, resume=resume,
        export=str(out / "model") if out and export else None, timeout=timeout, backend=backend,
        device_memory=number_of_bytes("--device-memory", device_memory),
    )  # fmt: skip
    require(backend, e, options)
    with _copies(copied, memory_dir, launcher, name) as memory:
        options = replace(options, memory=memory)
        most = restarts(max_restarts, options, default)
        if launched():
            _train_under_torchrun(e, options, json)
        result = run_training(e, options, f"training {e.model.name}", start, most)
    _print_training(result, json)
    if result["stopped"]:
        raise typer.Exit(130)
    if options.export:
        asks = ("generate", options.export, "--prompt", "TEXT")
        next_command(*(asks if e.model.is_encoder_decoder else ("eval", options.export, "--text", "stdlib-prose")))


@contextlib.contextmanager
def _copies(wanted: bool, folder: Path | None, launcher: str, experiment: str) -> Iterator[str | None]:
    """The directory for the experiment's copies in memory, if its plan wants them. Raises :class:`UserError`."""
    import os

    from ridgeline.jobs.launchers import launched
    from ridgeline.jobs.restart import memory_folder
    from ridgeline.spec.errors import Incompatible, UserError

    if not wanted:
        if folder is not None:
            raise UserError("--memory-dir is for the copies of an elastic plan, and this one keeps none",
                            "add elastic to the plan, or leave it out")  # fmt: skip
        yield None
        return
    if launcher == "ray":
        raise Incompatible("copies in memory: ranks that Ray starts again may be on other machines than their copies",
                           "start them with torchrun, or use --save-every with --max-restarts")  # fmt: skip
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if launched() and machines > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            "copies in memory: ranks that start again would find the addresses of those before in the agents' store",
            "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of every machine",
        )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "torchrun")
    with memory_folder(folder, f"{run}-{experiment}" if launched() else "") as memory:
        yield memory


def _train_under_torchrun(e: Experiment, options: TrainOptions, json: bool) -> NoReturn:
    import os
    import shutil

    from ridgeline.jobs.launchers import run_launched_rank

    def progress(message: dict[str, Any]) -> None:
        if "loss" in message:
            say(f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}")
        elif "warning" in message:
            say(f"step {message['step']}: {message['stage']}")

    result, code, message = run_launched_rank(e, options, progress)
    if message:
        say(message)
    if result is not None:
        _print_training(result, json)
    if code == 0 and options.memory and os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(options.memory, ignore_errors=True)
    sys.stdout.flush()
    os._exit(code)  # a rank whose peers have exited may hang in library destructors


def _print_training(result: dict[str, Any], json: bool) -> None:
    import json as js

    if json:
        print(js.dumps(result))
        return
    losses = result["losses"]
    line = f"{result['step']} steps, loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else "nothing to do"
    print(line + (f"; checkpoint {result['checkpoint']}" if result["checkpoint"] else ""))
    if result["stopped"]:
        print("interrupted" + ("; the same command goes on from there" if result["checkpoint"] else ": nothing was"
              " saved, as there is no --out"))  # fmt: skip
    if result["device_peak_bytes"]:
        print(f"device memory: {result['device_peak_bytes'] / 1e6:.1f} MB at most")
    for name, t in result["traffic"].items():
        print(f"{name}: {t['bytes'] / 1e6:.1f} MB in {t['count']} moves at {t['bandwidth'] / 1e9:.2f} GB/s")
