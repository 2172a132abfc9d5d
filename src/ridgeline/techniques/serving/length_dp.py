"""Padded batches of similar lengths, chosen by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ridgeline.runtime.partition import cheapest_runs
from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique

if TYPE_CHECKING:
    from ridgeline.spec.scheduling import Cost, Scheduling


class LengthDP(SchedulingTechnique):
    """Divide the queue into batches of similar length to minimize the cost of padding (TurboTransformers): of all
    partitions, the one with the smallest sum of batch times, which are measured once when the engine starts. Every
    batch of a queue is served before requests that arrive later. Only padded batches benefit: packed ones have no
    padding. The time is that of prompts: batches that run until all outputs end decode fewer sequences at once, and
    long outputs then take more time than the pads saved."""

    card: ClassVar[Card] = Card(
        name="length_dp",
        title="Batches by length",
        paper="arXiv:2010.05680",
        taxonomy="inference/scheduling/batching",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="the highest throughput of all ways to batch requests of varying length (TurboTransformers)",
        owns=frozenset({"queue"}),
        conflicts={"packed_rows": "the batches of {other} have no pads that another order of the queue could save"},
    )
    phase: ClassVar[Phase] = "loop"

    def scheduling(self, s: Scheduling) -> None:
        """Divide the queue into batches."""
        s.cut = by_length


def by_length(lengths: Sequence[int], adapters: Sequence[str], cost: Cost, own: Cost) -> list[list[int]]:
    """:func:`dp_batches`, whatever the adapters."""
    return dp_batches(lengths, cost)


def dp_batches(lengths: Sequence[int], cost: Cost) -> list[list[int]]:
    """The cheapest way to serve sequences of ``lengths`` in padded batches, as indices, shortest batch first.

    ``cost(length, batch)``: seconds of a batch padded to ``length``; infinite for one that is too large, and then for
    all larger ones. TurboTransformers' algorithm 3: sorted by length, S[i] = min over j ≤ i of S[j - 1] + cost(length
    i, i - j + 1). Where the cost never falls with the length, no other partition is cheaper. O(n²) calls of ``cost``.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    runs = cheapest_runs(len(order), lambda start, stop: cost(lengths[order[stop - 1]], stop - start))
    return [order[start:stop] for start, stop in runs]
