"""The size of the processor's caches."""

from __future__ import annotations

import math
import time

import torch

SIZES = tuple(1 << n for n in range(19, 29))
"""Bytes of the working sets that are copied, half of each to the other half."""
_TIMES = 7
_LEAST = 8 << 20
"""Minimum number of bytes copied per timing."""
_FASTER = 1.5
"""Minimum ratio of a cache's rate to that of memory."""


def cache_bytes(rates: dict[int, float] | None = None) -> int:
    """Bytes of the largest working set that is copied from cache rather than from memory; 0 if no cache shows.

    ``rates``: bytes per second by working set, by default those of :func:`copy_rates`. A set counts as cached up to the
    geometric mean of the fastest rate and the rate of the largest set.
    """
    rates = rates or copy_rates()
    fastest, memory = max(rates.values()), rates[max(rates)]
    if fastest < _FASTER * memory:
        return 0
    return max(size for size, rate in rates.items() if rate >= math.sqrt(fastest * memory))


def copy_rates() -> dict[int, float]:
    """Bytes per second (the best of seven) at which a working set of each of :data:`SIZES` is copied by all threads."""
    out = {}
    for size in SIZES:
        a = torch.ones(size // 8)
        b = a.clone()
        calls = max(1, _LEAST // size)
        times = []
        for _ in range(_TIMES):
            start = time.perf_counter()
            for _ in range(calls):
                b.copy_(a)
            times.append((time.perf_counter() - start) / calls)
        out[size] = size / min(times)
    return out
