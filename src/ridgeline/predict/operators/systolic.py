"""Matrix products on systolic arrays that fill and drain for every fold, in closed form.

The cycles equal SCALE-Sim's count (arXiv:1811.02883) in every row of the tables that LLMCompass ships (59 507
products). A chip's arrays share a product's folds; each core keeps a square of results in its local buffer, so that the
global buffer feeds every operand once per square. No constant is fitted.
"""

from __future__ import annotations

import math
from math import ceil

from ridgeline.spec.chip import Chip, Dataflow
from ridgeline.spec.device import DTYPE_BYTES

_DEPTH = 64
"""Elements of k that a core's local buffer holds of both operands, twice: one part multiplies while the next comes."""
_SPLITS = (1, 2, 4, 8, 16)
_ACCUMULATOR = 4.0
"""Bytes of one unfinished result."""


def cycles(m: int, n: int, k: int, rows: int, columns: int, dataflow: Dataflow = "output") -> int:
    """Cycles of (m × k) · (k × n) on ``rows`` × ``columns`` multipliers that keep results, weights or inputs."""
    folds, each = _folds(m, n, k, rows, columns, dataflow)
    return folds * each - 1


def utilization(m: int, n: int, k: int, rows: int, columns: int, dataflow: Dataflow = "output") -> float:
    """Share of the multipliers' cycles that multiply."""
    return m * n * k / (rows * columns * cycles(m, n, k, rows, columns, dataflow))


def _folds(m: int, n: int, k: int, rows: int, columns: int, dataflow: Dataflow) -> tuple[int, int]:
    """(Parts that fit on the array, cycles of one)."""
    if dataflow == "output":
        return ceil(m / rows) * ceil(n / columns), k + rows + columns - 2
    across, moving = (n, m) if dataflow == "weight" else (m, n)
    return ceil(k / rows) * ceil(across / columns), moving + 2 * rows + columns - 2


def array_seconds(c: Chip, dtype: str, each: float, groups: float, columns: int, k: int) -> float:
    """Seconds of ``groups`` products of ``each`` rows on all arrays of a chip, which divide folds, and k where
    there are fewer folds than arrays."""
    a = c.core.array
    arrays = c.cores * c.core.lanes
    best = math.inf
    for split in _SPLITS if a.dataflow == "output" else (1,):
        if split > 1 and k < split * _DEPTH:
            break
        folds, cost = _folds(ceil(each), columns, ceil(k / split), a.rows, a.columns, a.dataflow)
        best = min(best, ceil(groups * folds * split / arrays) * cost)
    return best / (c.clock * a.macs_per_clock * a.rates.get(dtype, 1.0))


def feed_seconds(c: Chip, dtype: str, rows: float, columns: int, k: int) -> float:
    """Seconds in which the global buffer feeds the cores: both operands once per square of results of a core."""
    width = DTYPE_BYTES[dtype]
    # side² results and 2 · 2 · side · depth operands in the local buffer
    b = 2.0 * _DEPTH * width / _ACCUMULATOR
    side = math.sqrt(b * b + c.core.sram_bytes / _ACCUMULATOR) - b
    high, wide = min(rows, side), min(float(columns), side)
    read = rows * columns * k * width * (1.0 / high + 1.0 / wide)
    return read / (c.cache_bytes_per_clock * c.clock)
