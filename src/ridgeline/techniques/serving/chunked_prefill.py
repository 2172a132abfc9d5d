"""Chunked prefill: prompts are processed in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique

if TYPE_CHECKING:
    from ridgeline.spec.scheduling import Scheduling


class ChunkedPrefill(SchedulingTechnique):
    """Process a long prompt in chunks that fill what decoding sequences leave of an iteration's token budget (Sarathi),
    so that decoding never waits for a whole prompt. Without it, a prompt is computed in one iteration."""

    card: ClassVar[Card] = Card(
        name="chunked_prefill",
        title="Chunked prefill",
        paper="arXiv:2308.16369",
        taxonomy="inference/scheduling/batching",
        tasks=frozenset({"serve"}),
        lossless=True,
        validated=frozenset({"serve"}),
        claim="up to 10x the decode throughput of LLaMA-13B on an A6000 (piggybacked decodes)",
        default_in=frozenset({"serve"}),
    )
    phase: ClassVar[Phase] = "loop"

    def scheduling(self, s: Scheduling) -> None:
        """Allow an iteration to compute part of a prompt."""
        s.limits.chunked = True
