"""One rank of a job: ``python -m ridgeline.jobs.worker JOB.json``, with torchrun's variables in the environment."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ridgeline.imports import uncollected
from ridgeline.jobs.failure import describe
from ridgeline.jobs.job import MODES, LaunchJob, RankContext
from ridgeline.jobs.malloc import keep_freed_memory
from ridgeline.spec.errors import UserError

TIMEOUT = 300.0
"""Seconds that a rank waits for the others in a collective, unless the job says otherwise."""


class Reporter:
    """Sends rank 0's messages to its parent as JSON lines; does nothing on other ranks."""

    def __init__(self, out: TextIO | None) -> None:
        self.out = out

    def __call__(self, message: dict[str, Any]) -> None:
        """Send one message."""
        if self.out is not None:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()


def setup(ranks: int, timeout: float | None = None) -> torch.device:
    """Threads, allocator, process group; returns this rank's device. ``timeout``: seconds of every collective."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if ranks > 1:
        backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= local else "gloo"
        wait = timedelta(seconds=timeout or TIMEOUT)
        # On one machine the ranks meet through a file: a port that is free now may be taken when they start.
        file = os.environ.get("RIDGELINE_RENDEZVOUS")
        dist.init_process_group(
            backend, f"file://{file}" if file else None, timeout=wait, rank=int(os.environ["RANK"]), world_size=ranks
        )
        # Groups made later (meshes, pipelines) would fall back to half an hour.
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if hasattr(dist.distributed_c10d, name):
                setattr(dist.distributed_c10d, name, wait)
    return device


def _follow_parent(rank: int) -> None:
    """Exit when the parent process exits, and set a process name that `top` shows (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        set_death_signal, set_name = 1, 15  # sys/prctl.h
        libc.prctl(set_death_signal, signal.SIGKILL)  # at SIGTERM training goes on to the end of its step
        libc.prctl(set_name, f"rank {rank}".encode())


def main(path: str) -> int:
    """Run the job of this rank; its outcome (a result or an error) is reported before it exits."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _follow_parent(rank)
    # Libraries that print must not mix with our messages.
    report = Reporter(os.fdopen(os.dup(1), "w") if rank == 0 else None)
    os.dup2(2, 1)
    code = 0
    try:
        job = LaunchJob.from_json(Path(path).read_text(encoding="utf-8"))
        device = setup(ranks, job.options.timeout)
        report({"result": run_rank(job, RankContext(device, rank, ranks, report))})
    except BaseException as error:
        if not isinstance(error, (UserError, KeyboardInterrupt)):
            traceback.print_exc()
        failure, code = describe(error, rank)
        failure["trace"] = traceback.format_exc()
        draft = Path(path).with_name(f".error-{rank}.new")
        draft.write_text(json.dumps(failure), encoding="utf-8")
        draft.replace(Path(path).with_name(f"error-{rank}.json"))
        report({"error": failure})
    sys.stderr.flush()
    # A rank whose peers died may hang in library destructors; everything that matters has been written.
    os._exit(code)


def run_rank(job: LaunchJob, here: RankContext) -> dict[str, Any]:
    """This rank's part of a job, by the function of its mode; rank 0 returns its result."""
    _, function = MODES[job.mode]
    with uncollected():
        run = resolve_name(function)
    result: dict[str, Any] = run(job.experiment, job.options, here)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
