"""One rank of a job: ``python -m ridgeline.train.worker JOB.json``, with torchrun's variables in the environment."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ridgeline.nn.meter import keep_freed_memory
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment

COLLECTIVE_TIMEOUT = timedelta(seconds=300)


class Reporter:
    """Rank 0's line of JSON objects to its parent; silent on the other ranks."""

    def __init__(self, out: TextIO | None) -> None:
        self.out = out

    def __call__(self, message: dict[str, Any]) -> None:
        """Send one message."""
        if self.out is not None:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()


def setup(ranks: int) -> torch.device:
    """Threads, allocator, process group; returns this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if ranks > 1:
        backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= ranks else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return device


def main(path: str) -> int:
    """Run the job of this rank; its outcome (a result or an error) is reported before it exits."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Libraries that print must not mix with our messages.
    report = Reporter(os.fdopen(os.dup(1), "w") if rank == 0 else None)
    os.dup2(2, 1)
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    code = 0
    try:
        device = setup(ranks)
        e = Experiment.model_validate(job["experiment"]) if job["experiment"] else None
        report({"result": run_rank(job["mode"], e, job["options"], device, rank, ranks, report)})
    except BaseException as error:
        if not isinstance(error, (UserError, KeyboardInterrupt)):
            traceback.print_exc()
        failure, code = describe(error)
        failure["trace"] = traceback.format_exc()
        draft = Path(path).with_name(f".error-{rank}.new")
        draft.write_text(json.dumps(failure), encoding="utf-8")
        draft.replace(Path(path).with_name(f"error-{rank}.json"))
        report({"error": failure})
    sys.stderr.flush()
    # A rank whose peers died may hang in library destructors; everything that matters has been written.
    os._exit(code)


def describe(error: BaseException) -> tuple[dict[str, Any], int]:
    """An exception as data (kind: user, oom, interrupted or error; what; fix; time), and the exit code."""
    text = str(error)
    what = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    said = {"kind": "error", "what": what, "fix": "", "incompatible": False, "time": time.time()}
    if isinstance(error, UserError):
        said.update(kind="user", what=error.what, fix=error.fix, incompatible=isinstance(error, Incompatible))
        return said, 3
    if isinstance(error, KeyboardInterrupt):
        said.update(kind="interrupted", what="interrupted")
        return said, 130
    refused = isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
    if refused or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        said.update(kind="oom", what=f"out of memory: {text.splitlines()[0] if text else ''}")
    return said, 4


def run_rank(
    mode: str,
    e: Experiment | None,
    options: dict[str, Any],
    device: torch.device,
    rank: int,
    ranks: int,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """This rank's part of a job; rank 0 returns its result."""
    if mode == "probe":
        from ridgeline.measure.probe_worker import probe_rank

        return probe_rank(device, rank, ranks, options, report)
    assert e is not None
    if mode == "train":
        from ridgeline.train.loop import train

        return train(e, device, rank, ranks, options, report)
    if mode == "measure":
        from ridgeline.measure.cell import measure_cell
        from ridgeline.measure.generation import generation_cell

        measured = measure_cell if e.is_training else generation_cell
        return measured(e, device, rank, ranks, options, report)
    if mode == "dissect":
        from ridgeline.measure.dissect import dissect_cell

        return dissect_cell(e, device, rank, ranks, options, report)
    raise ValueError(f"unknown mode {mode!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
