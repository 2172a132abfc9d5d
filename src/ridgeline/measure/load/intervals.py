"""Intervals for one run under load, whose requests are not independent: neighbors share a queue and a batch.

The circular block bootstrap (Politis & Romano, 1992) resamples stretches of consecutive requests instead of requests.
A stretch is as long as the run's mean concurrency, so that most requests that met each other stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_BLOCKS = 10
"""With fewer stretches than this in the run it says nothing about its own spread, and no interval is given."""
DRAWS = 400
_MOST_WORK = 40_000_000
"""Values looked at over all draws: bounds the time that millions of gaps take."""


class Spread(NamedTuple):
    """Mean and percentiles of a sample, each with the ends of its 95 % interval, where the run allows one."""

    mean: tuple[float, float] | None
    quantiles: list[tuple[float, float] | None]


def spreads(
    values: NDArray[np.float64], owner: NDArray[np.int64], requests: int, block: int, shares: Sequence[float]
) -> Spread:
    """95 % intervals of the mean and of quantiles at ``shares``. ``owner[i]``: the request, 0 to ``requests`` - 1 in
    order of arrival, that value i belongs to."""
    empty = Spread(None, [None] * len(shares))
    if not len(values) or requests < LEAST_BLOCKS * block:
        return empty
    order = np.argsort(values, kind="stable")
    v, own = values[order], owner[order]
    rng = np.random.default_rng(0)
    draws = max(100, min(DRAWS, _MOST_WORK // len(v)))
    blocks = math.ceil(requests / block)
    found = np.empty((draws, 1 + len(shares)))
    for d in range(draws):
        picked = (rng.integers(requests, size=(blocks, 1)) + np.arange(block)).ravel()[:requests] % requests
        weight = np.bincount(picked, minlength=requests)[own]
        cumulative = np.cumsum(weight)
        found[d, 0] = np.dot(v, weight) / max(1, cumulative[-1])
        at = np.searchsorted(cumulative, np.asarray(shares) * cumulative[-1])
        found[d, 1:] = v[np.minimum(at, len(v) - 1)]
    low, high = np.percentile(found, (2.5, 97.5), axis=0)
    ends = [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
    return Spread(ends[0], list(ends[1:]))


def block_length(requests: int, in_flight: float) -> int:
    """Requests in one stretch."""
    return math.ceil(max(1.0, in_flight, math.pow(requests, 1 / 3)))
