"""Sums that several programs have parts of, in Triton, for CUDA devices: added in one order, whichever is done last.
Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_parts(parts, arrived, y, total, base, to, inside, m, n):
    """Leave a program's sums ``total`` of outputs that are stored at ``to`` of ``y`` [m, n]; the last one of those
    outputs adds all in order and ``base``, and counts from zero again. ``parts`` fp32 [programs, m, n]: programs for
    the same outputs differ in the second axis of the grid; ``arrived`` int32: a zero for each of the others."""
    splits = tl.num_programs(1)
    tl.store(parts + tl.program_id(1).to(tl.int64) * m * n + to, total, inside)
    tl.debug_barrier()
    counter = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == splits - 1:
        tl.debug_barrier()
        whole = tl.zeros(total.shape, tl.float32)
        from_part = parts + to
        for _ in range(splits):
            whole += tl.load(from_part, inside, other=0.0, cache_modifier=".cg")
            from_part += m * n
        tl.store(y + to, (whole + base).to(y.dtype.element_ty), inside)
        tl.atomic_xchg(counter, 0)
