"""Which rows a program of a grouped product has, in Triton, for CUDA devices: rows that are sorted by expert are cut
into blocks that no two experts share, without a wait for how many each has. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_of_rows(starts, block, EXPERTS: tl.constexpr, SIZE: tl.constexpr):
    """(expert, its first row here, the row behind its last one) of a ``block`` of up to ``SIZE`` rows; the last two are
    equal where there is no such block. ``starts`` int32 [EXPERTS + 1]: where each expert's rows begin; ``EXPERTS``: a
    power of two."""
    each = tl.arange(0, EXPERTS)
    first, behind = tl.load(starts + each), tl.load(starts + each + 1)
    count = (behind - first + SIZE - 1) // SIZE
    until = tl.cumsum(count, 0)
    expert = tl.sum((until <= block).to(tl.int32), 0)
    mine = each == expert
    skipped = (block - tl.sum(tl.where(mine, until - count, 0), 0)) * SIZE
    end = tl.sum(tl.where(mine, behind, 0), 0)
    return expert, tl.where(expert < EXPERTS, tl.sum(tl.where(mine, first, 0), 0) + skipped, end), end


def most_blocks(rows: int, experts: int, size: int) -> int:
    """The most blocks of up to ``size`` that ``rows`` of ``experts`` can make, none of two experts."""
    reached = min(rows, experts)
    return (rows + reached * (size - 1)) // size
