"""Iteration-level scheduling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique

if TYPE_CHECKING:
    from ridgeline.spec.scheduling import Scheduling


class ContinuousBatching(SchedulingTechnique):
    """Let requests join and leave the batch at every iteration (Orca). Without it, a batch runs until its last request
    ends."""

    card: ClassVar[Card] = Card(
        name="continuous_batching",
        title="Continuous batching",
        paper="Orca, OSDI 2022",
        taxonomy="inference/scheduling/batching",
        tasks=frozenset({"serve"}),
        lossless=True,
        validated=frozenset({"serve"}),
        claim="36.9x the throughput of FasterTransformer at the same latency (GPT-3 175B)",
        default_in=frozenset({"serve"}),
    )
    phase: ClassVar[Phase] = "loop"

    def scheduling(self, s: Scheduling) -> None:
        """Admit requests while others are running."""
        s.limits.continuous = True
