"""The best cut of the layers into pipeline stages: a dynamic program (Alpa, arXiv:2201.12023, section 5.2).

A step of B micro-batches through stages that take t₁ … t_p seconds for each takes Σ tᵢ + (B - 1) · max tᵢ. For every
bound on the slowest stage the dynamic program finds the cut with the least sum; bounds are tried from small to large,
until the second term alone exceeds the best step found.
"""

from __future__ import annotations

import math
from collections.abc import Callable

StageCost = Callable[[int, int, int], float]
"""Seconds of a micro-batch in stage ``k`` with layers ``start`` to ``stop`` (excluded); infinite if it does not fit."""


def step_seconds(times: list[float], micros: int) -> float:
    """Seconds of a step with 1F1B: equation 2 of the paper."""
    slowest = max(times)
    return sum(times) + (micros - 1) * slowest if math.isfinite(slowest) else math.inf


def best_cut(stages: int, layers: int, micros: int, cost: StageCost, reach: int | None = None) -> list[int] | None:
    """Numbers of layers of every stage with the fewest seconds; None: no cut fits.

    ``reach``: how far a stage's number may be from the mean; None: any.
    """
    mean = layers / stages
    low = 1 if reach is None else max(1, math.floor(mean) - reach)
    high = layers if reach is None else min(layers, math.ceil(mean) + reach)
    times: list[dict[tuple[int, int], float]] = [
        {
            (start, start + n): cost(k, start, start + n)
            for start in range(k * low, min(k * high, layers - 1) + 1)
            for n in range(low, high + 1)
            if start + n + (stages - k - 1) * low <= layers <= start + n + (stages - k - 1) * high
        }
        for k in range(stages)
    ]
    best, found = math.inf, None
    for bound in sorted({t for of_stage in times for t in of_stage.values() if math.isfinite(t)}):
        if (micros - 1) * bound >= best:
            break
        cut = _least_sum(layers, times, bound)
        if cut is None:
            continue
        at, used = 0, []
        for of_stage, n in zip(times, cut, strict=True):
            used.append(of_stage[at, at + n])
            at += n
        seconds = step_seconds(used, micros)
        if seconds < best:
            best, found = seconds, cut
    return found


def _least_sum(layers: int, times: list[dict[tuple[int, int], float]], bound: float) -> list[int] | None:
    """The cut with the least sum among those whose stages take at most ``bound``."""
    sums: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for of_stage in times:
        reached: dict[int, tuple[float, int]] = {}
        for (start, stop), seconds in of_stage.items():
            if seconds <= bound and start in sums[-1]:
                total = sums[-1][start][0] + seconds
                if stop not in reached or total < reached[stop][0]:
                    reached[stop] = total, start
        sums.append(reached)
    if layers not in sums[-1]:
        return None
    cut, at = [], layers
    for reached in reversed(sums[1:]):
        start = reached[at][1]
        cut.append(at - start)
        at = start
    return cut[::-1]
