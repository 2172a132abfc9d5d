"""How activations cross a network: plain, or in 8 bits with a scale for each block of a row."""

from __future__ import annotations

from typing import Literal

Wire = Literal["blockwise8", "plain"]
LARGEST_BLOCK = 256
"""Values with one scale at most."""


def block_size(width: int) -> int:
    """The largest divisor of a row's ``width`` that is no more than :data:`LARGEST_BLOCK`: no block crosses rows."""
    return next(n for n in range(min(LARGEST_BLOCK, width), 0, -1) if width % n == 0)


def wire_bytes(rows: int, width: int, wire: Wire, wide: float = 4.0) -> float:
    """Bytes of ``rows`` × ``width`` activations; plain ones have ``wide`` bytes each."""
    return rows * width * wide if wire == "plain" else rows * (width + 4 * width // block_size(width))
