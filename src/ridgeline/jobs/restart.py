"""Restarts a job from its last copy or checkpoint when a rank is lost. No torch here."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.jobs.job import LaunchJob, Progress, TrainOptions
from ridgeline.jobs.launch import JobFailed
from ridgeline.spec.errors import UserError

RESTARTS = 3
"""Default number of restarts in a row, of a job on a cluster or with copies in memory, where ranks may be lost."""
MEMORY = Path("/dev/shm")
"""Where Linux has a directory in memory."""
Launch = Callable[[LaunchJob, Progress | None], dict[str, Any]]


def restarts(limit: int | None, options: TrainOptions, default: int) -> int:
    """How often in a row a job may be restarted: as requested, else ``default`` if it keeps checkpoints, or
    :data:`RESTARTS` if it keeps copies in memory.

    Raises :class:`UserError` when restarts are asked for and the job keeps neither.
    """
    kept = bool(options.out and options.save_every)
    if limit and not (kept or options.memory):
        raise UserError(
            f"--max-restarts {limit} needs checkpoints to start from, and this run keeps none",
            "add --out DIRECTORY --save-every STEPS, or elastic to the plan; or give --max-restarts 0",
        )
    if limit is not None:
        return limit
    return RESTARTS if options.memory else default if kept else 0


@contextlib.contextmanager
def memory_folder(given: Path | None, name: str = "") -> Iterator[str]:
    """A directory for the copies of one run, in ``given`` or the system's directory in memory. Without a ``name``, by
    which processes that start again find it, it is a new one that is removed at the end.

    Raises :class:`UserError` where there is no such directory.
    """
    within = MEMORY if given is None else given
    if not within.is_dir() or within == Path():
        raise UserError(f"elastic keeps copies of the state in memory, and there is no directory {within}",
                        "give --memory-dir DIRECTORY, on a tmpfs or similar")  # fmt: skip
    if name:
        yield str(within / f"ridgeline-{name}")
        return
    try:
        folder = tempfile.mkdtemp(prefix="ridgeline-", dir=within)
    except OSError as e:
        raise UserError(f"elastic cannot keep copies of the state in {within}: {e.strerror}",
                        "give --memory-dir DIRECTORY, on a tmpfs or similar") from None  # fmt: skip
    before = signal.signal(signal.SIGTERM, _end)  # which would leave the memory taken
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def run_with_restarts(launch: Launch, job: LaunchJob, progress: Progress | None, most: int) -> dict[str, Any]:
    """``launch(job)``; when its ranks fail, again from the newest copy or checkpoint, at most ``most`` times without a
    step beyond those that were done before.

    User mistakes and interrupts are not retried. The result contains the number of restarts.
    """
    assert isinstance(job.options, TrainOptions)
    furthest = total = tried = 0
    reached = 0

    def watch(message: dict[str, Any]) -> None:
        nonlocal reached
        if "loss" in message:
            reached = max(reached, int(message["step"]))
        if progress:
            progress(message)

    while True:
        try:
            return {**launch(job, watch), "restarts": total}
        except JobFailed as failure:
            tried, furthest = (1, reached) if reached > furthest else (tried + 1, furthest)
            if tried > most or failure.status == "interrupted":
                raise
            total += 1
            options = job.options
            assert isinstance(options, TrainOptions)
            if progress:
                last = "the copy in memory" if options.memory else _newest(Path(options.out or ""))
                progress({"stage": f"{failure.reason}; restart {tried} of {most} from {last}", "restart": True})
            job = replace(job, options=replace(options, resume=True))


def _newest(out: Path) -> str:
    names = sorted(p.parent.name for p in out.glob("step-*/state.json"))
    return names[-1] if names else "the start"
