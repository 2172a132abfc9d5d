"""How optimizer states are divided into blocks that share a scale: one rule for the analytic and the torch model."""

from __future__ import annotations

import math

SMALL = 4096
"""Tensors of fewer elements keep fp32 states (arXiv:2110.02861, section 2.3)."""
SHORTEST = 16
"""Shorter blocks would save little."""


def block_of(shape: tuple[int, ...], width: int, most: int) -> int:
    """Elements per block of a tensor [``shape``] of which a rank has rows of ``width`` elements: the largest divisor of
    the width that is at most ``most``; 0: it is not quantized."""
    if len(shape) < 2 or math.prod(shape) < SMALL:
        return 0
    block = max(d for d in range(1, most + 1) if width % d == 0)
    return block if block >= SHORTEST else 0
