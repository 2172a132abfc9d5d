"""How ``ridgeline probe`` times an operator and fits its rate."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CACHE_BYTES = 96 * 2**20
"""Inputs rotate through at least this much memory."""


@dataclass
class Work:
    """One timed operator: its function of the inputs, and what the graph counts for it forward and backward."""

    kind: str
    dtype: str
    make: Callable[[], tuple[Tensor, ...]]
    """Fresh inputs; those that require grad get gradients."""
    fn: Callable[..., Tensor]
    flops: float = 0.0
    bytes: float = 0.0
    back_flops: float = 0.0
    back_bytes: float = 0.0
    back_calls: int = 1
    """Graph operators that the backward stands for."""


SLOW = 5
"""Number of budgets that an operator may take before it is called less often than others."""


class Timer:
    """Times operators on one rank, at the same time as the other ``ranks``; ``budget``: seconds for each."""

    def __init__(self, device: torch.device, budget: float, ranks: int) -> None:
        self.device, self.budget, self.ranks = device, budget, ranks

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self) -> None:
        """Ranks start each measurement together, so that they disturb each other as in a real step."""
        if self.ranks > 1:
            dist.barrier()

    def any_rank(self, holds: bool) -> bool:
        """Whether it holds on any rank, so that all ranks take the same decision."""
        if self.ranks == 1:
            return holds
        flag = torch.tensor(float(holds), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def median(self, fns: Iterable[Callable[[], object]]) -> float:
        """Median seconds of calling the functions in turn: about ``budget`` seconds in all and at least 5 calls, of
        which an operator that is slow here (emulated bf16, a busy machine) makes fewer.
        """
        return self.medians([list(fns)])[0]

    def medians(self, groups: list[list[Callable[[], object]]]) -> list[float]:
        """:meth:`median` of each group of functions. Groups take turns, so that a machine whose rate changes meanwhile
        changes it for all."""
        self.together()
        start = time.perf_counter()
        for fns in groups:
            for fn in fns[:2]:
                fn()
        self.sync()
        times: list[list[float]] = [[] for _ in groups]
        while self._continues(len(times[0]), 5, len(groups) * self.budget, time.perf_counter() - start):
            i = len(times[0])
            for fns, taken in zip(groups, times, strict=True):
                t = time.perf_counter()
                fns[i % len(fns)]()
                self.sync()
                taken.append(time.perf_counter() - t)
        return [steady(taken) for taken in times]

    def work(self, w: Work) -> tuple[float, float]:
        """(forward, backward) steady seconds of one operator: the middle of three passes."""
        first = w.make()
        size = sum(t.numel() * t.element_size() for t in first)
        copies = [first, *(_copies(first) for _ in range(min(64, int(CACHE_BYTES / max(size, 1)))))]
        passes = [self._pass(w, copies) for _ in range(3)]
        return statistics.median(f for f, _ in passes), statistics.median(b for _, b in passes)

    def inference(self, w: Work) -> float:
        """Steady seconds of one operator's forward where nothing is kept for a backward."""
        with torch.inference_mode():
            first = w.make()
            size = sum(t.numel() * t.element_size() for t in first)
            inputs = [first, *(_copies(first) for _ in range(min(64, int(CACHE_BYTES / max(size, 1)))))]
            return self.median([functools.partial(w.fn, *x) for x in inputs])

    def _continues(self, calls: int, least: int, seconds: float, elapsed: float) -> bool:
        """Whether to call the operator once more, given ``calls`` done in ``elapsed`` seconds."""
        return calls == 0 or elapsed < seconds or (calls < least and elapsed < SLOW * self.budget)

    def _pass(self, w: Work, copies: list[tuple[Tensor, ...]]) -> tuple[float, float]:
        self.together()
        forward: list[float] = []
        backward: list[float] = []
        start = time.perf_counter()
        i = 0
        while self._continues(len(forward), 6, self.budget / 3, time.perf_counter() - start):
            inputs = copies[i % len(copies)]
            t0 = time.perf_counter()
            y = w.fn(*inputs)
            self.sync()
            t1 = time.perf_counter()
            wanted = [x for x in inputs if x.requires_grad]
            if wanted:
                g = torch.ones_like(y)
                self.sync()
                t2 = time.perf_counter()
                torch.autograd.grad(y, wanted, g)
                self.sync()
                backward.append(time.perf_counter() - t2)
            forward.append(t1 - t0)
            del y
            i += 1
        return steady(forward), steady(backward) if backward else 0.0


def _copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same values in memory of their own: drawing them anew would take longer than the measurement."""
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)


def steady(times: list[float]) -> float:
    """The median of the second half, when memory has been touched and caches are warm."""
    return statistics.median(times[len(times) // 2 :])


def affine(tiny: float, less: tuple[float, float], more: tuple[float, float]) -> dict[str, Any]:
    """Fit ``latency + bytes / B`` to two (bytes, seconds); ``tiny``: seconds of the smallest call, the least
    latency.

    What threads need to divide the work and to come up to speed is part of each call, but not of a tiny one.
    """
    (small, fast), (large, slow) = less, more
    latency = fast - small * (slow - fast) / (large - small)
    latency = max(tiny, min(latency, 0.5 * fast))  # more is noise: what starts a product is not most of it
    return {"latency": latency, "flop_rate": 0.0, "byte_rate": large / max(slow - latency, 0.5 * slow),
            "source": "measured"}  # fmt: skip


def rate(points: list[tuple[float, float, float]], source: str = "measured") -> dict[str, Any]:
    """Fit ``latency + max(flops / F, bytes / B)`` to (flops, bytes, seconds); the first point is the tiny one."""
    latency = points[0][2]
    rest = [(f, b, max(s - latency, 0.1 * s)) for f, b, s in points[1:]]
    flop = statistics.geometric_mean([f / s for f, _, s in rest]) if rest[0][0] else 0.0
    byte = 0.0 if flop else statistics.geometric_mean([b / s for _, b, s in rest])
    return {"latency": latency, "flop_rate": flop, "byte_rate": byte, "source": source}
