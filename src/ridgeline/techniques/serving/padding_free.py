"""Batches without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.spec.scheduling import Scheduling


class PaddingFree(Technique):
    """Compute the tokens of a batch and nothing else: sequences lie behind each other in one row, and attention takes
    them one by one (ByteTransformer). Off, each is padded to the longest of its batch, and pads are computed."""

    card: ClassVar[Card] = Card(
        name="padding_free",
        title="Padding-free batches",
        paper="arXiv:2210.03052",
        taxonomy="inference/memory/padding",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="87 % faster than PyTorch, and attention 6.13x as fast, on sequences of varying length (ByteTransformer)",
        changes=frozenset({"packed_rows"}),
        default_in=frozenset({"serve"}),
    )
    phase: ClassVar[Phase] = "loop"

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Operators stay as they are; the simulated scheduler knows. Other engines than our own pack in any case."""
        return g

    def scheduling(self, s: Scheduling) -> None:
        """Let a step have as many rows as it has tokens."""
        s.limits.padded = False
