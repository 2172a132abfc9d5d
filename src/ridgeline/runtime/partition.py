"""The cheapest way to partition a sequence into contiguous runs."""

from __future__ import annotations

import math
from collections.abc import Callable


def cheapest_runs(count: int, cost: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive runs of ``count`` items with the least sum of ``cost(start, stop)``.

    An infinite cost means that the run is too large, as are all longer ones with the same end; a single item is always
    a valid run. A dynamic program, S[i] = min over j ≤ i of S[j - 1] + cost(j, i) (TurboTransformers, arXiv:2010.05680,
    algorithm 3), with O(count²) calls.
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
