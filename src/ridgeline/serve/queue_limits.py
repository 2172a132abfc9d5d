"""Limits of the queue and of waiting times, and how fast the queue empties."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue and of waiting times. None: no limit."""

    queued_requests: int | None = 512
    """Outputs that have not been scheduled yet (a request counts ``n`` or ``best_of`` times, or once for each beam)."""
    queued_tokens: int | None = 1 << 20
    """Prompt tokens of those."""
    first_token: float | None = 300.0
    """Seconds that a request may wait until the first of its outputs is scheduled."""
    ttft: float | None = None
    """Seconds within which a request is expected to have its first token when it is taken; others are refused."""
    stall: float = 120.0
    """Seconds that one step may take before the server counts as unhealthy."""


class QueueSpeed:
    """How fast the queue empties: prompt tokens per second of steps, of which older ones count less and less."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.blocked = 0.0
        """Seconds of the last steps in which all waited."""

    def observe(self, tokens: int, seconds: float) -> None:
        """A step that computed this number of prompt tokens while others waited. Steps without any belong to the next
        one with some: what is known does not fade while nothing is learned."""
        self.blocked += seconds
        if tokens:
            self._tokens, self._seconds = 0.9 * self._tokens + tokens, 0.9 * self._seconds + self.blocked
            self.blocked = 0.0

    def seconds(self, tokens: int) -> float:
        """Expected for this number of prompt tokens; 0 before anything was observed."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
