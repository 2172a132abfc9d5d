"""Memory for weights on their way, in the order in which they are used: for the run and for its prediction."""

from __future__ import annotations

from collections import deque

RING_BYTES = (1 << 24, 1 << 26, 1 << 28)
"""Sizes of rings into which a probed CPU's copies from host memory are measured: small ones stay in its last cache."""


class RingSpace:
    """Memory of ``size`` bytes that is handed out in consecutive pieces, and given back in the same order."""

    def __init__(self, size: float) -> None:
        self.size = size
        self._held: deque[tuple[float, float]] = deque()

    def take(self, size: float) -> float | None:
        """The first byte of a piece of ``size`` bytes behind the last one; None while there is no room in one piece
        (for ever if it is larger than all)."""
        start, limit = 0.0, self.size
        if self._held:
            first, (last, length) = self._held[0][0], self._held[-1]
            start = last + length
            if last < first or (start + size > limit and size <= first):  # around the end, before the oldest piece
                start, limit = start if last < first else 0, first
        if start + size > limit:
            return None
        self._held.append((start, size))
        return start

    def give(self) -> None:
        """Give back the oldest piece. Raises ``IndexError`` if none is taken."""
        self._held.popleft()

    def clear(self) -> None:
        """Give back all."""
        self._held.clear()
