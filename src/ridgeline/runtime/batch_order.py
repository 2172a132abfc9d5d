"""Which queued sequences form a padded batch: the queue is divided by the cost of batches, in the engine as in its
simulation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Generic, TypeVar

from ridgeline.spec.scheduling import Cost, Cut, Limits

AT_ONCE = 256
"""Number of waiting sequences that are divided into batches together."""
STEP = 4
"""Factor between the lengths, and between the sizes of batches, whose time is known."""

T = TypeVar("T")


class CostTable:
    """Seconds of a padded batch by its length and size: linear between what is known, and never falling."""

    def __init__(self, known: dict[tuple[int, int], float]) -> None:
        """``known``: seconds by (length, batch), for every length at least of batch 1."""
        self.lengths = sorted({length for length, _ in known})
        self.batches = sorted({batch for _, batch in known})
        self.rows: list[list[float]] = []
        for length in self.lengths:
            row: list[float] = []
            shorter = self.rows[-1] if self.rows else [0.0] * len(self.batches)
            for i, batch in enumerate(self.batches):
                # What was too large to be measured grows with its size.
                seconds = known.get((length, batch), row[-1] * batch / self.batches[i - 1] if row else 0.0)
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


def grid(most: int) -> list[int]:
    """1, 4, 16 … up to ``most``."""
    return [STEP**i for i in range(1 + math.floor(math.log(most, STEP) + 1e-9))]


def free(length: int, batch: int) -> float:
    """The cost of a missing adapter: zero."""
    return 0.0


class CostOrderedBatches(Generic[T]):
    """A scheduling policy: the queue is divided into batches, and all of them are served before it is divided again.

    ``read`` gives the length and the adapter of what is queued.
    """

    def __init__(self, cut: Cut, limits: Limits, shared: Cost, own: Cost, read: Callable[[T], tuple[int, str]]) -> None:
        self.cut, self.limits, self.shared, self.own, self.read = cut, limits, shared, own, read
        self.batches: deque[list[T]] = deque()

    def __call__(self, waiting: deque[T]) -> int:
        """Put the next batch at the front of the queue → how many of its sequences still wait."""
        here = set(waiting)
        batch: list[T] = []
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

    def _divide(self, queued: list[T]) -> list[T]:
        """Divide the waiting sequences; returns the batch with the oldest one, which is served first."""
        read = [self.read(s) for s in queued]
        found = self.cut([n for n, _ in read], [a for _, a in read], self._within(self.shared), self._within(self.own))
        self.batches.extend([queued[i] for i in batch] for batch in sorted(found, key=min))
        return self.batches[0] if self.batches else []

    def _within(self, cost: Cost) -> Cost:
        def seconds(length: int, batch: int) -> float:
            many = batch > 1 and length * batch > self.limits.max_num_batched_tokens
            return math.inf if many or batch > self.limits.max_num_seqs else cost(length, batch)

        return seconds
