"""Which queued sequences form a batch when batches are padded: by a table of batch times measured at startup."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List

from ridgeline.runtime.serve_build import Cost, Cut
from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.request import EngineRequest
from ridgeline.serve.runner import Runner
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.spec.scheduling import Limits

AT_ONCE = 256
"""Number of waiting sequences that are divided into batches together."""
STEP = 4
"""Factor between the lengths, and between the sizes of batches, that are measured."""
SHORT = 0.1
"""Seconds below which a batch is measured twice; the shorter time counts."""
FULL = 0.85
"""Share of a proportional time from which on larger batches are taken to be in proportion."""


class CostTable:
    """Seconds of a padded batch by its length and size: linear between what was measured, and never falling."""

    def __init__(self, measured: dict[tuple[int, int], float]) -> None:
        """``measured``: seconds by (length, batch), for every length at least of batch 1."""
        self.lengths = sorted({length for length, _ in measured})
        self.batches = sorted({batch for _, batch in measured})
        self.rows: list[list[float]] = []
        for length in self.lengths:
            row: list[float] = []
            shorter = self.rows[-1] if self.rows else [0.0] * len(self.batches)
            for i, batch in enumerate(self.batches):
                # What was too large to be measured grows with its size.
                seconds = measured.get((length, batch), row[-1] * batch / self.batches[i - 1] if row else 0.0)
                row.append(max(seconds, shorter[i], *row[-1:]))
            self.rows.append(row)

    def __call__(self, length: int, batch: int) -> float:
        """Seconds of ``batch`` sequences padded to ``length``."""
        i = min(bisect_left(self.lengths, length), len(self.lengths) - 1)
        near = range(max(0, i - 1), i + 1)
        return _between([self.lengths[j] for j in near], [_between(self.batches, self.rows[j], batch) for j in near],
                        length)  # fmt: skip


def _between(at: List[int], values: List[float], x: int) -> float:
    """Linear between points, constant below them, proportional above them."""
    if x <= at[0]:
        return values[0]
    if x >= at[-1]:
        return values[-1] * x / at[-1]
    i = bisect_left(at, x)
    return values[i - 1] + (values[i] - values[i - 1]) * (x - at[i - 1]) / (at[i] - at[i - 1])


def free(length: int, batch: int) -> float:
    """The cost of a missing adapter: zero."""
    return 0.0


def measure_costs(runner: Runner, blocks: Blocks, limits: Limits, longest: int) -> CostTable:
    """Time batches of the engine that is about to start, as large as a step may be."""
    most = min(longest, limits.max_num_batched_tokens)
    found: dict[tuple[int, int], float] = {}
    for length in [*_grid(most), most]:
        before = 0.0
        for batch in _grid(limits.max_num_seqs):
            if batch > 1 and length * batch > limits.max_num_batched_tokens:
                break
            seqs = [Sequence(SequenceGroup(EngineRequest("", [0] * length), 0), 0, [0] * length) for _ in range(batch)]
            if runner.keeps and any(blocks.grow(s, length) is None for s in seqs):
                seconds = None
            else:
                if not found:  # one-time setup must not count
                    _seconds(runner, seqs, length)
                seconds = _seconds(runner, seqs, length)
                if seconds < SHORT:
                    seconds = min(seconds, _seconds(runner, seqs, length))
            for s in seqs:
                blocks.release(s)
            if seconds is None:
                break
            found[length, batch] = seconds
            if before and seconds > FULL * STEP * before:
                break
            before = seconds
    return CostTable(found)


def measure_task(adapters: AdapterTable, shared: CostTable, measure: Callable[[], CostTable]) -> CostTable:
    """What the sequences of one task add to a batch, taken from a LoRA of rank 8 around every linear."""
    with adapters.probe():
        both = measure()
    return CostTable({
        (length, batch): max(0.0, both(length, batch) - shared(length, batch))
        for length in both.lengths for batch in both.batches
    })  # fmt: skip


def _grid(most: int) -> list[int]:
    return [STEP**i for i in range(1 + math.floor(math.log(most, STEP) + 1e-9))]


def _seconds(runner: Runner, seqs: list[Sequence], length: int) -> float:
    start = time.perf_counter()
    runner.run([(s, length) for s in seqs], [])[-1].tolist()  # which waits for the device
    return time.perf_counter() - start


class CostOrderedBatches:
    """A scheduling policy: the queue is divided into batches, and all of them are served before it is divided again."""

    def __init__(self, cut: Cut, limits: Limits, shared: Cost, own: Cost) -> None:
        self.cut, self.limits, self.shared, self.own = cut, limits, shared, own
        self.batches: deque[list[Sequence]] = deque()

    def __call__(self, waiting: deque[Sequence]) -> int:
        """Put the next batch at the front of the queue → how many of its sequences still wait."""
        here = set(waiting)
        batch: list[Sequence] = []
        while self.batches and not batch:
            batch = [s for s in self.batches[0] if s in here]
            if not batch:  # all of it is running or has ended
                self.batches.popleft()
        if not batch:
            batch = self._divide([*waiting][:AT_ONCE])
        taken = set(batch)
        rest = [s for s in waiting if s not in taken]
        waiting.clear()
        waiting.extend([*batch, *rest])
        return len(batch)

    def _divide(self, seqs: list[Sequence]) -> list[Sequence]:
        """Divide the waiting sequences; returns the batch with the oldest one, which is served first."""
        adapters = [s.group.request.adapter or "" for s in seqs]
        found = self.cut([s.total for s in seqs], adapters, self._within(self.shared), self._within(self.own))
        self.batches.extend([seqs[i] for i in batch] for batch in sorted(found, key=min))
        return self.batches[0] if self.batches else []

    def _within(self, cost: Cost) -> Cost:
        def seconds(length: int, batch: int) -> float:
            many = batch > 1 and length * batch > self.limits.max_num_batched_tokens
            return math.inf if many or batch > self.limits.max_num_seqs else cost(length, batch)

        return seconds
