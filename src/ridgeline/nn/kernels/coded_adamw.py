"""AdamW with moments in one-byte codes, in Triton: one launch for a parameter, in which moments are decoded, updated
and encoded in registers. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.quick import blocks, power, quick, warps

NUMBERS = 1024
"""Of a program, at least: 8 in each of 128 threads, whose codes are one load of 64 bits."""


@triton.jit
def _decode(codes, values, peaks, inside):
    """Of blocks [blocks, size]; zero outside of them, where code 0 would be -1."""
    return tl.where(inside, tl.load(values + codes.to(tl.int32)) * peaks[:, None], 0.0)


@triton.jit
def _encode(x, first, midpoints):
    """(codes, peaks) of blocks [blocks, size], by the tables of :func:`~ridgeline.nn.quant.codec.search_tables`.
    Magnitudes are compared as bits, in whose order NaN is above infinity."""
    peaks = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scaled = x / tl.maximum(peaks, 1.1754943508222875e-38)[:, None]
    codes = tl.load(first + ((scaled.to(tl.int32, bitcast=True) >> 16) + 32768)).to(tl.int32)
    codes += (scaled > tl.load(midpoints + codes)).to(tl.int32)
    return codes.to(tl.uint8), peaks


@quick
@triton.jit
def _coded_adamw(weight, grad, m_codes, m_peaks, v_codes, v_peaks, m_values, m_first, m_midpoints, v_values, v_first,
                 v_midpoints, count, keep, beta1_rest, beta2, beta2_rest, eps, step_size, root,
                 WIDTH: tl.constexpr, SIZE: tl.constexpr, TALL: tl.constexpr):  # fmt: skip
    """``count`` blocks of ``WIDTH`` numbers, ``TALL`` of them in a program."""
    block = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, SIZE)
    there = block < count
    at = block[:, None] * WIDTH + column[None, :]
    inside = there[:, None] & (column < WIDTH)[None, :]
    m = _decode(tl.load(m_codes + at, inside, other=0), m_values, tl.load(m_peaks + block, there, other=0.0), inside)
    v = _decode(tl.load(v_codes + at, inside, other=0), v_values, tl.load(v_peaks + block, there, other=0.0), inside)
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    m += beta1_rest * (g - m)
    v = v * beta2 + beta2_rest * g * g
    w = tl.load(weight + at, inside, other=0.0).to(tl.float32) * keep
    w += step_size * (m / (tl.sqrt(v) / root + eps))
    tl.store(weight + at, w.to(weight.dtype.element_ty), inside)
    codes, peaks = _encode(m, m_first, m_midpoints)
    tl.store(m_codes + at, codes, inside)
    tl.store(m_peaks + block, peaks, there)
    codes, peaks = _encode(v, v_first, v_midpoints)
    tl.store(v_codes + at, codes, inside)
    tl.store(v_peaks + block, peaks, there)


def coded_adamw(
    weight: Tensor, grad: Tensor, m: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], tables: tuple[Tensor, ...],
    block: int, numbers: tuple[float, ...],
) -> None:  # fmt: skip
    """Update ``weight`` and its moments' (codes, peaks of blocks), all contiguous, in place. ``tables``: values, first
    codes and midpoints of the signed code, then of the unsigned one. ``numbers``: 1 - η λ, 1 - β₁, β₂, 1 - β₂, ε,
    -η / (1 - β₁ᵗ), √(1 - β₂ᵗ)."""
    count, size = weight.numel() // block, power(block)
    tall = max(1, NUMBERS // size)
    _coded_adamw[(blocks(count, tall),)](weight, grad, *m, *v, *tables, count, *numbers, block, size, tall,
                                         num_warps=warps(size))  # fmt: skip
