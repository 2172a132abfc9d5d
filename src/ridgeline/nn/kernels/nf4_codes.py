"""Weights from NF4 codes with doubly quantized scales, in Triton, in one launch. Imported only where Triton is
installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.quick import blocks, quick

TALL = 64
"""Blocks of a program: 16 bytes of codes, a load of 128 bits, in each of 128 threads."""


@quick
@triton.jit
def _expand_nf4(codes, scales, spans, values, scale_values, out, count, row_blocks, half,
                HALF: tl.constexpr, TALL: tl.constexpr):  # fmt: skip
    """``count`` blocks of ``HALF`` bytes, ``row_blocks`` in each row of ``half`` bytes."""
    block = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    there = block < count
    row, first = block // row_blocks, (block % row_blocks) * HALF
    scale = tl.load(scale_values + tl.load(scales + block, there, other=0).to(tl.int32))
    largest = tl.load(spans + 2 * row, there, other=0.0)
    peak = (scale * largest + tl.load(spans + 2 * row + 1, there, other=0.0))[:, None]
    at = tl.arange(0, HALF)
    inside = there[:, None] & (first[:, None] + at[None, :] < half)
    byte = tl.load(codes + (row * half + first)[:, None] + at[None, :], inside, other=0).to(tl.int32)
    upper, lower = tl.load(values + (byte >> 4)) * peak, tl.load(values + (byte & 15)) * peak
    both = tl.interleave(upper.to(out.dtype.element_ty), lower.to(out.dtype.element_ty))
    wide = tl.arange(0, 2 * HALF)
    inside = there[:, None] & (2 * first[:, None] + wide[None, :] < 2 * half)
    tl.store(out + 2 * (row * half + first)[:, None] + wide[None, :], both, inside)


def expand_nf4(
    codes: Tensor, scales: Tensor, spans: Tensor, values: Tensor, scale_values: Tensor, out: Tensor, block: int
) -> None:
    """Write weights ``out`` [rows, in] from codes (uint8 [rows, in/2], the first of two in the upper half) of the 16
    ``values`` and from scales of blocks of ``block`` numbers of a row (uint8 [rows, blocks]), which stand for one of
    256 ``scale_values``, by the first of a row's ``spans`` (fp32 [rows, 2]), plus the second one. All are contiguous.

    Products and sums are rounded apart, as by PyTorch's operators: results are the same to the last bit.
    """
    rows, half = codes.shape
    row_blocks = scales.shape[1]
    count = rows * row_blocks
    _expand_nf4[(blocks(count, TALL),)](codes, scales, spans, values, scale_values, out, count, row_blocks, half,
                                        block // 2, TALL, enable_fp_fusion=False)  # fmt: skip
