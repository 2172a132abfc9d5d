"""Confidence intervals of predictions, combined from the known errors of the parts.

Errors of one kind of operator are correlated (they share constants), so their seconds add up; errors of different kinds
are independent, so their squares do. The error of whole steps beyond their parts is a constant per task, and others are
of what is not known: the load, the engine. ``benchmarks/predict_inference.py`` fits these others: the least with which
95 % of the errors lie inside the interval, every engine counting as much as any other; ``ENGINE`` also holds 95 % of
every engine with 20 rows or more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.spec.result import Metric, Row

STEP = {"pretrain": 0.05, "finetune": 0.05, "generate": 0.08, "compress": 0.08, "serve": 0.12}
"""Relative 68 % error of a whole step, batch or simulation in addition to the errors of its operators."""
FIRST = {"generate": 0.18, "serve": 0.28}
"""The same of the time to first token in addition: how prompts are batched, and in serving how requests queue."""
LOAD = 0.28
"""The same for the share of a time to first token that a request waits for others, if nothing is known of the load
generator but its lengths and its number of clients: how much lengths vary, and whether all clients start at once."""
ENGINE = {"first": 0.51, "token": 0.15}
"""The same for an engine, or a device under it, that has no published measurements: until the first token, and per
token."""
MEMORY = 0.04
"""The same for peak memory: of what is allocated."""
RESERVED = {"allocator": 0.065, "stages": 0.15}
"""The same in training on a GPU in addition, of what the caching allocator keeps in pieces that nothing fits in; where
stages of a pipeline hold several micro-batches, more. The least that holds 95 % of the published runs of torchtitan: 14
without stages, 6 with."""
UNVALIDATED = 0.15
"""The same for a plan with a technique whose predictions were never compared with published measurements (assumed)."""
_UNKNOWN = 0.3
_EXACT = ("tokens_per_step", "trained_parameters", "kv_cache_tokens")
_PHASES = {"ttft": "prefill", "tpot": "decode", "itl": "decode"}
"""The phase of the breakdown that metrics of these names are made of."""
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


class Known(NamedTuple):
    """What is known of a prediction beside its operators."""

    validated: bool = True
    """Whether all techniques were compared with published measurements in the task."""
    engine: bool = True
    """Whether the seconds of its engine were fitted to measurements on its device; also without an engine."""
    waiting: float = 0.0
    """Share of the mean time to first token that requests wait for others, where the load is not known."""
    reserved: str = ""
    """Why memory is reserved beyond what is allocated, a key of ``RESERVED``; empty: it is not."""

    @property
    def memory_spread(self) -> float:
        """Relative 68 % error of peak memory."""
        return math.hypot(MEMORY, RESERVED.get(self.reserved, 0.0))


def causes(task: str, first: bool, known: Known) -> dict[str, float]:
    """Relative 68 % errors that a latency, throughput or other time has beside its operators and its step, by the name
    of the constant: until the ``first`` token, or not."""
    found = {}
    if first and task in FIRST:
        found = {"FIRST": FIRST[task], "LOAD": LOAD * known.waiting}
    if not known.engine:
        found["ENGINE"] = ENGINE["first" if first else "token"]
    if not known.validated:
        found["UNVALIDATED"] = UNVALIDATED
    return found


def latency_spread(rows: Iterable[Row], task: str, first: bool, known: Known = Known()) -> float:
    """Relative 68 % error of a latency, throughput or other time: until the ``first`` token, or not."""
    return math.hypot(spread_of(rows, task), *causes(task, first, known).values())


def stated_spread(m: Metric) -> float:
    """The relative 68 % error that a metric's interval states."""
    assert m.high is not None
    return math.log(m.high / m.value) / _95


def add_intervals(metrics: dict[str, Metric], rows: Iterable[Row], task: str, known: Known = Known()) -> None:
    """Give every metric its 95 % interval, in place."""
    rows = list(rows)
    spreads: dict[tuple[str, bool], float] = {}
    for name, m in metrics.items():
        if name in _EXACT:
            m.low = m.high = m.value
            continue
        phase = next((p for start, p in _PHASES.items() if name.startswith(start)), "")
        key = phase, name.startswith("ttft")
        if key not in spreads:
            spreads[key] = latency_spread([r for r in rows if r.phase == phase] or rows, task, key[1], known)
        own = known.memory_spread if name == "peak_bytes" else spreads[key]
        factor = math.exp(_95 * own)
        m.low, m.high = m.value / factor, m.value * factor
        if m.unit == "" and name.endswith(("_share", "mfu", "hfu")):
            m.high = max(m.value, min(1.0, m.high))
