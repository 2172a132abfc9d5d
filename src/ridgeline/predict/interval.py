"""Confidence intervals of predictions, combined from the known errors of the parts.

Errors of one kind of operator are correlated (they share constants), so their seconds add up; errors of different kinds
are independent, so their squares do. The error of whole steps beyond their parts is a constant per task, from
cross-validation on open data (``benchmarks/results``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from ridgeline.spec.result import Metric, Row

STEP = {"pretrain": 0.05, "finetune": 0.05, "generate": 0.08, "compress": 0.08, "serve": 0.12}
"""Relative 68 % error of a whole step, batch or simulation in addition to the errors of its operators."""
QUEUE = 0.20
"""The same for the time to first token under load, which includes queueing."""
MEMORY = 0.04
"""The same for peak memory."""
UNVALIDATED = 0.15
"""The same for a plan with a technique whose predictions were never compared with published measurements (assumed)."""
_UNKNOWN = 0.3
_EXACT = ("tokens_per_step", "trained_parameters", "kv_cache_tokens")
_95 = 1.96


def spread_of(rows: Iterable[Row], task: str) -> float:
    """Relative 68 % error of a prediction whose time breakdown is ``rows``."""
    kinds: dict[str, float] = defaultdict(float)
    total = 0.0
    for row in rows:
        seconds = row.seconds if row.exposed_seconds is None else row.exposed_seconds
        total += seconds
        kinds[row.kind] += seconds * (_UNKNOWN if row.spread is None else row.spread)
    parts = math.sqrt(sum(x * x for x in kinds.values())) / total if total else 0.0
    return math.hypot(parts, STEP[task])


def add_intervals(metrics: dict[str, Metric], rows: Iterable[Row], task: str, validated: bool = True) -> None:
    """Give every metric its 95 % interval, in place; wider if not all techniques are ``validated`` in the task."""
    spread = math.hypot(spread_of(rows, task), 0.0 if validated else UNVALIDATED)
    for name, m in metrics.items():
        if name in _EXACT:
            m.low = m.high = m.value
            continue
        own = MEMORY if name == "peak_bytes" else spread
        if task == "serve" and name.startswith("ttft"):
            own = math.hypot(own, QUEUE)
        factor = math.exp(_95 * own)
        m.low, m.high = m.value / factor, m.value * factor
        if m.unit == "" and name.endswith(("_share", "mfu", "hfu")):
            m.high = max(m.value, min(1.0, m.high))
