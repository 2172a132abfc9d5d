"""Two-level search of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.spec.scheduling import Scheduling


class HierarchicalSearch(SchedulingTechnique):
    """Choose tokens and beams by groups of the vocabulary first: exact, and most logits are read only once
    (LightSeq)."""

    card: ClassVar[Card] = Card(
        name="hierarchical_search",
        title="Hierarchical auto-regressive search",
        paper="arXiv:2010.13887",
        taxonomy="inference/decoding/search",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="up to 14x TensorFlow's and 1.4x FasterTransformer's speed in machine translation (LightSeq as a whole)",
        default_in=frozenset({"serve"}),
    )
    phase: ClassVar[Phase] = "loop"

    def scheduling(self, s: Scheduling) -> None:
        """One pass over the logits finds the groups' maxima; the cost of the few groups that are searched is
        negligible."""
        s.logit_reads = 1

    def serve(self, run: ServeBuild) -> None:
        """Use two-level search."""
        run.hierarchical = True
