"""Collectives and copies by size, timed on the ranks of one job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.jobs.job import RankContext, SweepOptions
from ridgeline.measure.probing.disk import read_seconds
from ridgeline.nn.memory.tiered_store import PAGE
from ridgeline.paths import cache_dir
from ridgeline.spec.experiment import Experiment

ROUNDS = 5
"""Measurements of each size, of which the median is kept."""
MOVED = 1 << 25
"""Bytes that one measurement moves, in calls one after another, as NCCL's own tests call them."""
MOST = 64
"""Calls of one measurement at most."""


def sweep_rank(e: Experiment | None, options: SweepOptions, here: RankContext) -> dict[str, Any]:
    """Seconds of one call by operator and bytes: of a collective with more than one rank (those of the slowest rank;
    bytes are of the whole buffer on one rank), else of copies."""
    device = here.device
    makers = _collectives(here.ranks) if here.ranks > 1 else _copies(device)
    found: dict[str, list[list[float]]] = {}
    for name, make in makers.items():
        here.report({"stage": name.replace("_", "-")})
        found[name] = [[size, _seconds(make(size, device), size, here)] for size in options.sizes]
    if here.ranks == 1:
        here.report({"stage": "disk"})
        sizes = sorted({max(PAGE, size) for size in options.sizes})
        found["disk_copy"] = [[size, s] for size, s in read_seconds(cache_dir(), sizes).items()]
    return {"kind": "gpu" if device.type == "cuda" else "cpu", "seconds": found}


Make = Callable[[int, torch.device], Callable[[], object]]
"""Makes the call of a number of bytes."""


def _collectives(ranks: int) -> dict[str, Make]:
    def buffers(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        each = max(1, size // 4 // ranks)
        return torch.ones(each * ranks, device=device), torch.ones(each, device=device)

    def all_reduce(size: int, device: torch.device) -> Callable[[], object]:
        whole, _ = buffers(size, device)
        whole.zero_()  # sums of sums would overflow
        return lambda: dist.all_reduce(whole)

    def all_gather(size: int, device: torch.device) -> Callable[[], object]:
        whole, part = buffers(size, device)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def reduce_scatter(size: int, device: torch.device) -> Callable[[], object]:
        whole, part = buffers(size, device)
        return lambda: dist.reduce_scatter_tensor(part, whole)

    return {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


def _copies(device: torch.device) -> dict[str, Make]:
    """Through host memory (to a GPU: from pinned memory over its link), and within a GPU's own."""

    def copy(source: Tensor, target: Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source, non_blocking=True)

    def host(size: int, device: torch.device) -> Callable[[], object]:
        source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return copy(source, torch.zeros(size, dtype=torch.uint8, device=device))

    def own(size: int, device: torch.device) -> Callable[[], object]:
        return copy(*(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)))

    found: dict[str, Make] = {"host_copy": host}
    if device.type == "cuda":
        found["device_copy"] = own
    return found


def _seconds(call: Callable[[], object], size: int, here: RankContext) -> float:
    """Median seconds of a call, of the slowest rank."""

    def sync() -> None:
        if here.device.type == "cuda":
            torch.cuda.synchronize(here.device)

    calls = max(2, min(MOST, MOVED // size))
    call()
    sync()
    times = []
    for _ in range(ROUNDS):
        if here.ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        sync()
        times.append((time.perf_counter() - start) / calls)
    slowest = torch.tensor(times, dtype=torch.float64, device=here.device)
    if here.ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())
