"""Products of one row with a 16-bit weight in Triton, for CUDA devices: a decode step of one sequence reads each weight
once and does little else.

Each program multiplies a few of the weight's rows, which it streams a block of inputs at a time; all inputs of a row
are its own, so that one launch leaves the result (cuBLAS splits them and adds the parts in a second one), and the order
of the sums is always the same. Sums are fp32. Sizes of a program were chosen on an H100, at the shapes of a model of 8B
(``benchmarks/gpu/campaign/kernels.py`` times two of them). Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.early import LINE, prefetch, wait
from ridgeline.nn.kernels.quick import blocks, quick

ROWS, BLOCK, WARPS, STAGES = 8, 512, 4, 3
"""Rows of the weight for a program, inputs of a block, warps, and blocks in flight."""
ALIGNED = 8
"""Inputs of which a weight must have a multiple, so that all of its rows are read 128 bits at a time."""
AHEAD = 1024
"""Bytes of each row of the weight, a power of two of 128-byte lines, that are fetched while earlier kernels run."""


@quick
@triton.jit
def _product_of_row(x, w, bias, y, n, parts, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
                    AHEAD: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """``n``: outputs. ``parts``: of ``ALIGNED`` inputs. ``GATED``: of the weight's two halves, gate and up, SwiGLU is
    the output; a program has the rows of both in turn. ``EVEN``: no block of inputs reaches over the edge."""
    k = parts * ALIGNED  # by which the compiler knows how rows are aligned
    of = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = of < (2 * n if GATED else n)
    rows = of // 2 + of % 2 * n if GATED else of
    there = exists[:, None]
    along = tl.arange(0, BLOCK)
    from_w = w + rows.to(tl.int64)[:, None] * k + along[None, :]
    if EARLY and AHEAD:
        EACH: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, AHEAD // LINE) * EACH, k - 1)
        prefetch(w + tl.where(exists, rows, 0).to(tl.int64)[:, None] * k + line[None, :])
    wait(EARLY)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, k, BLOCK, num_stages=STAGES):
        if EVEN:
            held = tl.load(from_w + start, there, other=0.0, eviction_policy="evict_first")
            a = tl.load(x + start + along)
        else:
            inside = start + along < k
            held = tl.load(from_w + start, there & inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + start + along, inside, other=0.0)
        total += held.to(tl.float32) * a.to(tl.float32)[None, :]
    sums = tl.sum(total, 1)
    if HAS_BIAS:
        sums += tl.load(bias + rows, exists, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums.to(y.dtype.element_ty).to(tl.float32), [ROWS // 2, 2]))
        to = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(y + to, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), to < n)
    else:
        tl.store(y + rows, sums.to(y.dtype.element_ty), exists)


def product_of_row(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """``x`` [..., k] of one row times ``weight`` [n, k], plus ``bias`` [n] → [..., n]; all contiguous, of one dtype
    (bf16 or fp16), k a multiple of ``ALIGNED``. ``gated``: silu(first half) · second half of that → [..., n / 2]."""
    rows, k = weight.shape
    n = rows // 2 if gated else rows
    y = torch.empty(*x.shape[:-1], n, dtype=weight.dtype, device=weight.device)
    _product_of_row[blocks(rows, ROWS),](
        x, weight, y if bias is None else bias, y, n, k // ALIGNED, gated, bias is not None, k % BLOCK == 0, ROWS,
        BLOCK, ALIGNED, STAGES, AHEAD, num_warps=WARPS,
    )  # fmt: skip
    return y
