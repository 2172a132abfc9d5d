"""Products of one row with a weight in 16 bits or in float8 codes, in Triton, for CUDA devices: a decode step of one
sequence reads each weight once and does little else.

Each program multiplies a few of the weight's rows, which it streams a block of inputs at a time; all inputs of a row
are its own, so that one launch leaves the result (cuBLAS splits them and adds the parts in a second one), and the order
of the sums is always the same. Sums are fp32. Codes (e4m3) are widened in registers, which is exact, and inputs stay in
16 bits, so that nothing is rounded but the result; sums are multiplied by the row's scale at the end.
Sizes of a program were chosen on an H100, at the shapes of a model of 8B
(``benchmarks/gpu/campaign/kernels.py`` times two of them), those for codes by what the compiler makes of them. Imported
only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.e4m3 import widened
from ridgeline.nn.kernels.early import LINE, prefetch, wait
from ridgeline.nn.kernels.quick import blocks, quick
from ridgeline.nn.kernels.target import capability

ROWS, BYTES, WARPS, STAGES = 8, 1024, 4, 3
"""Rows of the weight for a program, bytes of each in a block, warps, and blocks in flight."""
ALIGNED = 16
"""Bytes of which a weight's rows must have a multiple, so that they are read 128 bits at a time."""
AHEAD = 1024
"""Bytes of each row of the weight, a power of two of 128-byte lines, that are fetched while earlier kernels run."""


@triton.jit
def _widened(held, KIND: tl.constexpr):
    """Weights in fp32. ``KIND``: 0: in 16 bits; 1: e4m3 codes; 2: the same, where the device has no instruction for
    them."""
    if KIND == 1:
        return held.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif KIND == 2:
        return widened(held, tl.float32)
    else:
        return held.to(tl.float32)


@quick
@triton.jit
def _product_of_row(x, w, scales, bias, y, n, parts, KIND: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
                    EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
                    STAGES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """``n``: outputs. ``parts``: of ``EACH`` inputs. ``KIND``: of the weight, as of :func:`_widened`; ``scales`` [n]
    are for codes. ``GATED``: of the weight's two halves, gate and up, SwiGLU is the output; a program has the rows of
    both in turn. ``EVEN``: no block of inputs reaches over the edge."""
    k = parts * EACH  # by which the compiler knows how rows are aligned
    of = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = of < (2 * n if GATED else n)
    rows = of // 2 + of % 2 * n if GATED else of
    there = exists[:, None]
    along = tl.arange(0, BLOCK)
    from_w = w + rows.to(tl.int64)[:, None] * k + along[None, :]
    if EARLY and AHEAD:
        PER_LINE: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, AHEAD // LINE) * PER_LINE, k - 1)
        prefetch(w + tl.where(exists, rows, 0).to(tl.int64)[:, None] * k + line[None, :])
    wait(EARLY)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, k, BLOCK, num_stages=STAGES):
        if EVEN:
            held = tl.load(from_w + start, there, other=0, eviction_policy="evict_first")
            a = tl.load(x + start + along)
        else:
            inside = start + along < k
            held = tl.load(from_w + start, there & inside[None, :], other=0, eviction_policy="evict_first")
            a = tl.load(x + start + along, inside, other=0.0)
        total += _widened(held, KIND) * a.to(tl.float32)[None, :]
    sums = tl.sum(total, 1)
    if KIND:
        sums *= tl.load(scales + rows, exists, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + rows, exists, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums.to(y.dtype.element_ty).to(tl.float32), [ROWS // 2, 2]))
        to = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(y + to, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), to < n)
    else:
        tl.store(y + rows, sums.to(y.dtype.element_ty), exists)


def product_of_row(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False, scales: Tensor | None = None
) -> Tensor:
    """``x`` [..., k] of one row times ``weight`` [n, k], plus ``bias`` [n] → [..., n]; all contiguous, of one dtype
    (bf16 or fp16), rows of the weight a multiple of ``ALIGNED`` bytes. Or ``weight`` is codes in e4m3, none of them
    NaN, that ``scales`` (fp32, one for each row) are to be multiplied by. ``gated``: silu(first half) · second half of
    that → [..., n / 2]."""
    rows, k = weight.shape
    n = rows // 2 if gated else rows
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=weight.device)
    block, each = BYTES // weight.itemsize, ALIGNED // weight.itemsize
    kind = 0 if scales is None else 1 if capability() >= 89 else 2
    _product_of_row[blocks(rows, ROWS),](
        x, weight if scales is None else weight.view(torch.uint8), y if scales is None else scales,
        y if bias is None else bias, y, n, k // each, kind, gated, bias is not None, k % block == 0, ROWS, block, each,
        STAGES, AHEAD, num_warps=WARPS,
    )  # fmt: skip
    return y
