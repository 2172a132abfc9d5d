"""What commands that run jobs share: training under a progress bar, and the error of a failed job."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.cli.base import say
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.jobs.job import TrainOptions
    from ridgeline.jobs.launch import JobFailed
    from ridgeline.jobs.restart import Launch
    from ridgeline.spec.experiment import Experiment


def require_saves(async_save: bool, save_every: int) -> None:
    """Raise :class:`UserError` for ``--async-save`` where no checkpoint is written before the end."""
    if async_save and not save_every:
        raise UserError("--async-save writes checkpoints while training goes on, and none is written before its end",
                        "give --out and --save-every, or leave it out")  # fmt: skip


def run_training(
    e: Experiment, options: TrainOptions, title: str, start: Launch | None = None, restarts: int = 0
) -> dict[str, Any]:
    """The result of a training job in processes of its own, under a progress bar. ``start``: what launches them, None:
    this machine. SIGTERM, to this process or to ranks, does what Ctrl-C does."""
    from ridgeline.jobs.job import train_job
    from ridgeline.jobs.launch import JobFailed, run_job
    from ridgeline.jobs.restart import run_with_restarts
    from ridgeline.report.console import StepBar

    with StepBar(title, e.training.steps) as bar, _sigterm_as_ctrl_c():
        try:
            return run_with_restarts(start or run_job, train_job(e, options), bar.message, restarts)
        except JobFailed as failure:
            raise failed(failure) from None


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def failed(failure: JobFailed) -> Exception:
    """The exception to raise for a failed job, after printing its log and reason."""
    if failure.log:
        say(failure.log)
    say(f"the run failed ({failure.status}): {failure.reason}")
    return typer.Exit(1)
