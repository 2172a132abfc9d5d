"""Cycles of a matrix product on a systolic array that fills and drains for every fold, in closed form.

Equal to SCALE-Sim's count (arXiv:1811.02883) in every row of the tables that LLMCompass ships (59 507 products).
"""

from __future__ import annotations

from math import ceil

from ridgeline.spec.chip import Dataflow


def cycles(m: int, n: int, k: int, rows: int, columns: int, dataflow: Dataflow = "output") -> int:
    """Cycles of (m × k) · (k × n) on ``rows`` × ``columns`` multipliers that keep results, weights or inputs."""
    if dataflow == "output":
        return ceil(m / rows) * ceil(n / columns) * (k + rows + columns - 2) - 1
    across, moving = (n, m) if dataflow == "weight" else (m, n)
    return ceil(k / rows) * ceil(across / columns) * (moving + 2 * rows + columns - 2) - 1


def utilization(m: int, n: int, k: int, rows: int, columns: int, dataflow: Dataflow = "output") -> float:
    """Share of the multipliers' cycles that multiply."""
    return m * n * k / (rows * columns * cycles(m, n, k, rows, columns, dataflow))
