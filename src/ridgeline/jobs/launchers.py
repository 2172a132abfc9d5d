"""Who starts the ranks: this process on this machine, torchrun around it, or Ray. No torch until a rank runs."""

from __future__ import annotations

import os
import time
from typing import Any

from ridgeline.imports import uncollected
from ridgeline.jobs.job import Progress, RankContext, TrainOptions, train_job
from ridgeline.jobs.launch import run_job
from ridgeline.jobs.restart import RESTARTS, Launch
from ridgeline.spec.errors import Incompatible, UserError, unknown
from ridgeline.spec.experiment import Experiment


def launcher_of(name: str) -> tuple[Launch, int]:
    """The function that starts a job, and how often it may start again by default.

    Raises :class:`UserError` for an unknown name or one whose package is missing.
    """
    if name == "local":
        return run_job, 0
    if name == "ray":
        from ridgeline.jobs.ray_launcher import require_ray, run_on_ray

        require_ray()
        return run_on_ray, RESTARTS
    raise unknown("launcher", name, ("local", "ray"), "--launcher")


def launched() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def reports_errors() -> bool:
    """Whether this process reports a mistake that every rank finds: rank 0 does, and the others let it go first, since
    a launcher ends all ranks when one has ended."""
    if not launched() or os.environ.get("RANK", "0") == "0":
        return True
    time.sleep(3)
    return False


def run_launched_rank(
    e: Experiment, options: TrainOptions, progress: Progress
) -> tuple[dict[str, Any] | None, int, str]:
    """Run the rank that the launcher's variables name: (the result, on rank 0; exit code; message to print)."""
    with uncollected():
        from ridgeline.jobs.failure import describe
        from ridgeline.jobs.worker import run_rank, setup

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        _require_world(e, ranks)
        device = setup(ranks, options.timeout)
        report: Progress = progress if rank == 0 else lambda message: None
        result = run_rank(train_job(e, options), RankContext(device, rank, ranks, report))
        return (result if rank == 0 else None), (130 if result["stopped"] else 0), ""
    except UserError as error:
        # A plan that cannot work is found by every rank; other mistakes may be of one machine.
        shown = not isinstance(error, Incompatible) or reports_errors()
        return None, 2, f"rank {rank}: error: {error}" if shown else ""
    except Exception as error:
        failure, _ = describe(error, rank)
        # Losing a peer is what all but one rank will report: one a machine is enough (torchrun names who died).
        if failure["kind"] == "lost" and os.environ.get("LOCAL_RANK", "0") != "0":
            return None, 1, ""
        return None, 1, f"the run failed ({failure['kind']}): {failure['what']}"


def resized(e: Experiment) -> list[str]:
    """Overrides that run ``e`` on as many ranks as the launcher has started now, with the same batches."""
    ranks = int(os.environ["WORLD_SIZE"])
    return [] if e.world == ranks else [f'on="{_cluster(ranks)}"', f"workload.batch_size={e.batch_size}"]


def _cluster(ranks: int) -> str:
    each = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return f"{ranks // each}x{each}xlocal" if ranks > each else f"{ranks}xlocal"


def _require_world(e: Experiment, ranks: int) -> None:
    if e.world != ranks:
        raise Incompatible(
            f"torchrun started {ranks} ranks, the experiment has {e.world}", f'set on="{_cluster(ranks)}"'
        )
