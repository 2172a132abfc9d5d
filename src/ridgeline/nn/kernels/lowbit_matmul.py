"""Products with low-bit weights in Triton, for CUDA devices: weights are dequantized in registers.

Weights are stored as in :class:`ridgeline.nn.quant.packed_linear.Words`: int32 words dense along the inputs, scales and
zeros per group of inputs. Sums are fp32. Few rows of activations are multiplied as vectors, more as tiles; where there
are fewer blocks of outputs than processors, the inputs are split between programs, whose partial sums are added
atomically. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_ROWS = 4
"""Maximum number of rows that are multiplied as vectors: tensor cores need at least 16."""
_PROGRAMS = 264
"""Number of programs that fill a large device twice."""


@triton.jit
def _codes(words, rows, row_words, columns, inside, BITS: tl.constexpr):
    """Codes [rows, columns] as integers. One of 3, 5, 6 or 7 bits may begin in one word and end in the next."""
    bit = columns * BITS
    at = bit >> 5
    start = (bit & 31)[None, :]
    mask = inside & (at < row_words)[None, :]
    base = words + rows[:, None].to(tl.int64) * row_words + at[None, :]
    low = tl.load(base, mask, other=0).to(tl.uint32, bitcast=True)
    value = low >> start.to(tl.uint32)
    if 32 % BITS != 0:
        across = start + BITS > 32
        high = tl.load(base + 1, mask & across, other=0).to(tl.uint32, bitcast=True)
        shift = tl.where(across, 32 - start, 0).to(tl.uint32)
        value = tl.where(across, value | (high << shift), value)
    return (value & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _tile(words, scale, zero, rows, columns, n, k, row_words, groups, group, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
          ONE_GROUP: tl.constexpr):  # fmt: skip
    """Weights [rows, columns] in fp32, zero outside."""
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    codes = _codes(words, rows, row_words, columns, inside, BITS)
    if ONE_GROUP:  # the whole tile lies in one group of inputs
        which = rows[:, None] * groups + (tl.min(columns, 0) // group)
        known = (rows < n)[:, None]
    else:
        which = rows[:, None] * groups + (columns // group)[None, :]
        known = inside
    s = tl.load(scale + which, known, other=0.0).to(tl.float32)
    if HAS_ZERO:
        centered = codes - tl.load(zero + which, known, other=0).to(tl.int32)
    else:
        centered = codes - (1 << (BITS - 1))
    return tl.where(inside, centered.to(tl.float32) * s, 0.0)


@triton.jit
def _vector(x, words, scale, zero, y, m, n, k, row_words, groups, group, per_split, BITS: tl.constexpr,
            HAS_ZERO: tl.constexpr, ONE_GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * per_split
    lines = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(begin, tl.minimum(begin + per_split, k), BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _tile(words, scale, zero, rows, columns, n, k, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP)
        there = (lines < m)[:, None] & (columns < k)[None, :]
        a = tl.load(x + lines[:, None] * k + columns[None, :], there, other=0.0).to(tl.float32)
        total += tl.sum(a[:, None, :] * w[None, :, :], 2)
    tl.atomic_add(y + lines[:, None] * n + rows[None, :], total, (lines < m)[:, None] & (rows < n)[None, :])


@triton.jit
def _matrix(x, words, scale, zero, y, m, n, k, row_words, groups, group, per_split, BITS: tl.constexpr,
            HAS_ZERO: tl.constexpr, ONE_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * per_split
    lines = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, tl.minimum(begin + per_split, k), BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _tile(words, scale, zero, rows, columns, n, k, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP)
        there = (lines < m)[:, None] & (columns < k)[None, :]
        a = tl.load(x + lines[:, None].to(tl.int64) * k + columns[None, :], there, other=0.0)
        total = tl.dot(a, tl.trans(w).to(a.dtype), total)
    tl.atomic_add(y + lines[:, None].to(tl.int64) * n + rows[None, :], total,
                  (lines < m)[:, None] & (rows < n)[None, :])  # fmt: skip


def lowbit_product(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    """``x`` [M, in] (fp32, bf16 or fp16, contiguous or not) times a quantized weight → [M, out] fp32.

    ``words`` int32 [out, ceil(in·bits / 32)], ``scale`` [out, groups], ``zero`` uint8 [out, groups] or None
    (2^(bits-1)), ``group`` inputs per scale.
    """
    x = x.contiguous()
    m, k = x.shape
    n, row_words = words.shape
    y = torch.zeros(m, n, dtype=torch.float32, device=x.device)
    few = m <= VECTOR_ROWS
    block_n, block_k = (16, 128) if few else (64, 64)
    while block_k > 16 and block_k > group:
        block_k //= 2
    blocks = triton.cdiv(n, block_n) * (1 if few else triton.cdiv(m, 64))
    tiles = triton.cdiv(k, block_k)
    per_split = triton.cdiv(tiles, max(1, min(tiles, _PROGRAMS // blocks))) * block_k
    splits = triton.cdiv(k, per_split)
    given = (x, words, scale, words if zero is None else zero, y, m, n, k, row_words, k // group, group, per_split)
    flags = (bits, zero is not None, group % block_k == 0)
    if few:
        _vector[(triton.cdiv(n, block_n), splits)](*given, *flags, triton.next_power_of_2(m), block_n, block_k)
    else:
        block_m = 64 if m > 32 else 32 if m > 16 else 16
        grid = (triton.cdiv(n, block_n), splits, triton.cdiv(m, block_m))
        _matrix[grid](*given, *flags, block_m, block_n, block_k)
    return y
