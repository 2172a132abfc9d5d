"""The cheapest way to cut a row of things into runs of neighbors."""

from __future__ import annotations

import math
from collections.abc import Callable


def cheapest_runs(count: int, cost: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive runs of ``count`` things with the least sum of ``cost(start, stop)``.

    Infinite: such a run is too large, and then so are all longer ones with its end; one thing by itself is always a
    run. A dynamic program, S[i] = min over j ≤ i of S[j - 1] + cost(j, i) (TurboTransformers, arXiv:2010.05680,
    algorithm 3), of O(count²) calls.
    """
    best, start = [0.0], [0]
    for i in range(count):
        found, at = math.inf, i
        for j in range(i, -1, -1):
            seconds = cost(j, i + 1)
            if math.isinf(seconds) and j < i:
                break
            if best[j] + seconds < found:
                found, at = best[j] + seconds, j
        best.append(found)
        start.append(at)
    runs: list[tuple[int, int]] = []
    end = count
    while end:
        runs.append((start[end], end))
        end = start[end]
    return runs[::-1]
