"""Restarts a job from its last complete checkpoint when a rank is lost. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.jobs.job import LaunchJob, Progress, TrainOptions
from ridgeline.jobs.launch import JobFailed
from ridgeline.spec.errors import UserError

RESTARTS = 3
"""Default number of restarts of a job on a cluster, where ranks may be lost."""
Launch = Callable[[LaunchJob, Progress | None], dict[str, Any]]


def restarts(limit: int | None, options: TrainOptions, default: int) -> int:
    """How often a job may be restarted: as requested, else ``default`` if it keeps checkpoints.

    Raises :class:`UserError` when restarts are asked for and the job keeps no checkpoints.
    """
    kept = bool(options.out and options.save_every)
    if limit and not kept:
        raise UserError(
            f"--max-restarts {limit} needs checkpoints to start from, and this run keeps none",
            "add --out DIRECTORY --save-every STEPS, or --max-restarts 0",
        )
    return (default if kept else 0) if limit is None else limit


def run_with_restarts(launch: Launch, job: LaunchJob, progress: Progress | None, most: int) -> dict[str, Any]:
    """``launch(job)``; when its ranks fail, again from the newest checkpoint, at most ``most`` times.

    User mistakes and interrupts are not retried. The result contains the number of restarts.
    """
    options = job.options
    assert isinstance(options, TrainOptions)
    for attempt in range(most + 1):
        try:
            return {**launch(job, progress), "restarts": attempt}
        except JobFailed as failure:
            if attempt == most or failure.status == "interrupted":
                raise
            if progress:
                last = _newest(Path(options.out or ""))
                progress({"stage": f"{failure.reason}; restart {attempt + 1} of {most} from {last}", "restart": True})
            job = replace(job, options=replace(options, resume=True))
    raise AssertionError


def _newest(out: Path) -> str:
    names = sorted(p.parent.name for p in out.glob("step-*/state.json"))
    return names[-1] if names else "the start"
