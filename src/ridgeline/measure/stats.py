"""Statistics of repeated timings: intervals, warm-up, outliers, verdicts. Pure functions, deterministic.

A *block* is one run (one process, one repeat). Its steps share a clock state, an allocator and what else the machine
does, so they are not independent. Everything here that makes an interval therefore takes blocks, not one flat list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.spec.result import Metric, Sample

Array = NDArray[np.float64]
Blocks = Sequence[Sequence[float]]
Statistic = Callable[..., Any]
"""A reduction with numpy's signature, ``f(array, axis=...)``: ``np.median``, ``np.mean``."""

SpeedVerdict = Literal["faster", "slower", "no difference"]

LEVEL = 0.95
"""Of every interval in this file."""
MARGIN = 0.02
"""Relative differences below this count as none."""
MAD_TO_SIGMA = 1.4826
"""Median absolute deviation × this = standard deviation, for normal data."""


STUDENT = (4.303, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom; the last serves for more. The first would be
12.7, with which two runs could never show anything: two runs get the factor of three, and cover 80–95 % instead."""


class Interval(NamedTuple):
    """A point estimate with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap_ci(blocks: Blocks, statistic: Statistic = np.median, n: int = 2000, seed: int = 0) -> Interval:
    """95 % interval of a statistic by the hierarchical bootstrap: runs are resampled, then the steps inside each.

    Few runs show too little of the spread between runs, so the deviations are widened (see :func:`_widen`). One run
    alone says nothing about that spread: its interval covers its own steps only. Raises ``ValueError`` without a value.
    """
    data = _clean(blocks)
    value = float(statistic(np.concatenate(data), axis=None))
    draws = _resample(data, statistic, n, np.random.default_rng(seed))
    if min(float(b.min()) for b in data) > 0:
        # Times and rates spread by factors, and an interval of theirs must not reach below zero.
        low, high = _ends(np.log(draws / value) * _widen([np.log(b) for b in data], statistic))
        return Interval(value, value * math.exp(low), value * math.exp(high))
    low, high = _ends((draws - value) * _widen(data, statistic))
    return Interval(value, value + low, value + high)


def ratio_ci(
    a_blocks: Blocks,
    b_blocks: Blocks,
    statistic: Statistic = np.median,
    n: int = 2000,
    seed: int = 0,
    paired: bool = False,
) -> Interval:
    """95 % interval of ``statistic(a) / statistic(b)``: the speed-up of b over a, when both are seconds.

    ``paired``: run *i* of a and run *i* of b were measured back to back, so the same runs are drawn for both and what
    slows the machine down for a while cancels out. Needs as many runs of a as of b. Values must be positive.
    """
    a, b = _clean(a_blocks), _clean(b_blocks)
    if min(float(x.min()) for x in (*a, *b)) <= 0:
        raise ValueError("a ratio needs positive values")
    if paired and len(a) != len(b):
        raise ValueError(f"paired runs must match: {len(a)} runs against {len(b)}")
    # Ratios are symmetric on a log scale: twice as fast and half as fast are equally far from one.
    value = math.log(float(statistic(np.concatenate(a), axis=None)) / float(statistic(np.concatenate(b), axis=None)))
    rng = np.random.default_rng(seed)
    runs = rng.integers(0, len(a), (n, len(a))) if paired else None
    draws = np.log(_resample(a, statistic, n, rng, runs) / _resample(b, statistic, n, rng, runs)) - value
    if paired:
        widen = _widen([np.log(x / statistic(y, axis=None)) for x, y in zip(a, b, strict=True)], statistic)
    else:
        widen = max(_widen([np.log(x) for x in side], statistic) for side in (a, b))
    low, high = _ends(draws * widen)
    return Interval(math.exp(value), math.exp(value + low), math.exp(value + high))


def perplexity(losses: Sequence[float]) -> Interval:
    """exp of the mean loss over windows, with the 95 % bootstrap interval over windows."""
    mean, low, high = bootstrap_ci([list(losses)], np.mean)
    return Interval(math.exp(mean), math.exp(low), math.exp(high))


def perplexity_ratio(losses: Sequence[float], base: Sequence[float]) -> Interval:
    """Perplexity over that of ``base``, paired window by window: the windows' own difficulty cancels.

    Raises ``ValueError`` when they were not taken on the same number of windows.
    """
    if len(losses) != len(base):
        raise ValueError(f"{len(losses)} windows against {len(base)}")
    change = np.asarray(losses) - np.asarray(base)
    draws = np.random.default_rng(0).choice(change, (2000, len(change))).mean(1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return Interval(*(math.exp(float(v)) for v in (change.mean(), low, high)))


def verdict(low: float, high: float, margin: float = MARGIN) -> SpeedVerdict:
    """The verdict that the interval of a speed-up supports. Less than ``margin`` either way counts as no difference."""
    if low > 1 + margin:
        return "faster"
    if high < 1 - margin:
        return "slower"
    return "no difference"


def warmup_steps(seconds: Sequence[float]) -> int:
    """Length of the warm-up prefix, by the *settling-time rule*.

    The second half of the run, which is never dropped, gives a band: median ± 3 robust standard deviations (at least
    ± 1 %). Warm-up ends before the first two steps in a row inside the band. The first step always counts as warm-up,
    and at most half of the steps do, so a run of one step has none.
    """
    x = np.asarray(seconds, dtype=np.float64)
    most = len(x) // 2
    if most == 0:
        return 0
    tail = x[most:]
    middle = float(np.median(tail))
    width = max(3 * MAD_TO_SIGMA * float(np.median(np.abs(tail - middle))), 0.01 * abs(middle))
    near = np.abs(x - middle) <= width
    for i in range(1, most):
        if near[i] and near[i + 1]:
            return i
    return most


class OutlierNote(NamedTuple):
    """Indices of unusual values, and a sentence about them (empty when there are none)."""

    indices: list[int]
    note: str


def outliers(values: Sequence[float], threshold: float = 3.5) -> OutlierNote:
    """Values whose modified z score exceeds ``threshold`` (Iglewicz & Hoaglin, 1993). They are only reported."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 3:
        return OutlierNote([], "")
    middle = float(np.median(x))
    distance = np.abs(x - middle)
    scale = MAD_TO_SIGMA * float(np.median(distance))
    if scale == 0:  # more than half of the values are equal: fall back to the mean absolute deviation
        scale = 1.2533 * float(distance.mean())
    if scale == 0:
        return OutlierNote([], "")
    indices = [int(i) for i in np.flatnonzero(distance / scale > threshold)]
    if not indices:
        return OutlierNote([], "")
    worst = max(indices, key=lambda i: distance[i])
    which = ", ".join(str(i) for i in indices[:5]) + (", …" if len(indices) > 5 else "")
    factor = f", the worst {x[worst] / middle:.2g}× the median" if middle else ""
    many = "step is an outlier" if len(indices) == 1 else "steps are outliers"
    return OutlierNote(
        indices,
        f"{len(indices)} of {len(x)} {many} (index {which}){factor}: something else may be using the machine",
    )


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0-100), or None when n cannot support it: p95 needs 20 values, p99 100, p99.9 1000."""
    tail = min(q, 100 - q)
    if not values or (tail < 50 and len(values) * tail < 100 - 1e-9):
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def summary(
    blocks: Blocks,
    unit: str = "s",
    statistic: Statistic = np.median,
    better: Literal["lower", "higher", ""] = "lower",
    source: str = "measured",
) -> Metric:
    """A statistic of repeated runs as a Metric with its 95 % interval and the number of values behind it."""
    ci = bootstrap_ci(blocks, statistic)
    n = sum(len(b) for b in blocks)
    return Metric(value=ci.value, unit=unit, low=ci.low, high=ci.high, n=n, better=better, source=source)


def step_blocks(samples: Sequence[Sample], per_token: bool = False) -> list[list[float]]:
    """Seconds (or seconds per token) of the steps that are not warm-up: one block per repeat, in their order."""
    runs: dict[int, list[float]] = {}
    for s in samples:
        if not s.warmup and (s.tokens or not per_token):
            runs.setdefault(s.repeat, []).append(s.seconds / s.tokens if per_token else s.seconds)
    return [runs[k] for k in sorted(runs)]


def _clean(blocks: Blocks) -> list[Array]:
    data = [np.asarray(b, dtype=np.float64) for b in blocks if len(b)]
    if not data:
        raise ValueError("no values: an interval needs at least one")
    if not all(np.isfinite(b).all() for b in data):
        raise ValueError("values must be finite")
    return data


def _widen(data: list[Array], statistic: Statistic) -> float:
    """Factor on the bootstrap's deviations that makes up for few runs.

    Resampling R runs with replacement shows (R-1)/R of the variance between them: √(R/(R-1)) corrects that (Davison &
    Hinkley, *Bootstrap Methods*, §3.8). That variance is itself known from R runs only: Student's t with R-1 degrees of
    freedom instead of the normal's 1.96, as far as runs differ by more than their own steps explain.
    """
    runs = len(data)
    if runs < 2:
        return 1.0
    between = float(np.var([float(statistic(b, axis=None)) for b in data], ddof=1))
    # Variance of one run's median from its steps alone, π/2 s²/n; a little too much for a mean.
    within = math.pi / 2 * float(np.mean([np.var(b, ddof=1) / len(b) if len(b) > 1 else 0.0 for b in data]))
    share = max(0.0, 1 - within / between) if between > 0 else 0.0
    student = STUDENT[min(runs - 1, len(STUDENT)) - 1] / 1.96
    return math.sqrt(runs / (runs - 1)) * (1 + share * (student - 1))


def _ends(draws: Array) -> tuple[float, float]:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def _resample(
    data: list[Array], statistic: Statistic, n: int, rng: np.random.Generator, runs: NDArray[np.int64] | None = None
) -> Array:
    """``n`` values of the statistic, each of a resampled set of runs with resampled steps."""
    lengths = np.array([len(b) for b in data])
    if runs is None:
        runs = rng.integers(0, len(data), (n, len(data)))
    longest = int(lengths.max())
    table = np.full((len(data), longest), np.nan)
    for row, block in zip(table, data, strict=True):
        row[: len(block)] = block
    size = lengths[runs][:, :, None]
    steps = (rng.random((*runs.shape, longest)) * size).astype(np.int64)
    drawn = table[runs[:, :, None], steps]
    if (lengths == longest).all():
        return np.asarray(statistic(drawn.reshape(n, -1), axis=1), dtype=np.float64)
    used = np.arange(longest) < size
    return np.array([float(statistic(d[u], axis=None)) for d, u in zip(drawn, used, strict=True)])
