"""Products with low-bit weights in Triton, for CUDA devices: weights are dequantized in registers.

Weights are stored as in :class:`ridgeline.nn.quant.packed_linear.Words`: int32 words dense along the inputs, scales and
zeros per group of inputs. Where a word holds whole codes of one group, it is loaded once and a code becomes a float by
its place in a mantissa; otherwise (3, 5, 6 or 7 bits, uneven groups) each code is looked up. Sums are fp32. Few rows of
activations are multiplied as vectors, more as tiles on tensor cores, many by PyTorch's own product with a weight that
is expanded first. Where there are fewer blocks of outputs than processors, the inputs are split between programs, whose
partial sums are added in order. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors

VECTOR_ROWS = 2
"""Maximum number of rows that are multiplied as vectors: tensor cores need at least 16."""
MANY_ROWS = 128
"""Number of rows from which on the weight is expanded first: every 64 rows would expand it again."""


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
def _held(words, scale, zero, rows, at, n, row_words, groups, group, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
          ONE_GROUP: tl.constexpr):  # fmt: skip
    """Whole words [rows, at]; what stands for zero, plus 2^BITS, and the scale of each, or of each row where all words
    lie in one group of inputs. The scale is zero outside."""
    PER: tl.constexpr = 32 // BITS
    inside = (rows < n)[:, None] & (at < row_words)[None, :]
    held = tl.load(words + rows[:, None].to(tl.int64) * row_words + at[None, :], inside, other=0)
    if ONE_GROUP:
        which = rows[:, None] * groups + (tl.min(at, 0) * PER // group)
        known = (rows < n)[:, None] & (tl.min(at, 0) < row_words)
    else:
        which = rows[:, None] * groups + (at * PER // group)[None, :]
        known = inside
    s = tl.load(scale + which, known, other=0.0).to(tl.float32)
    if HAS_ZERO:
        center = tl.load(zero + which, known, other=0).to(tl.float32) + (1 << BITS)
    else:
        center = tl.full(s.shape, 1.5 * (1 << BITS), tl.float32)
    return held.to(tl.uint32, bitcast=True), center, s


@triton.jit
def _code(moved, BITS: tl.constexpr):
    """2^BITS + the code that stands in words at the top of a float's mantissa."""
    bits = (moved & (((1 << BITS) - 1) << (23 - BITS))) | ((127 + BITS) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _one(held, center, s, AT: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """The weights of code ``AT`` of words, in ``dtype``."""
    UP: tl.constexpr = 23 - BITS - BITS * AT
    moved = held << UP if UP >= 0 else held >> -UP
    return (_code(moved, BITS) * s - center).to(dtype)


@triton.jit
def _two(held, center, s, AT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes AT and AT + HALF, so that joining all puts those of a word in order."""
    return tl.join(_one(held, center, s, AT, BITS, dtype), _one(held, center, s, AT + HALF, BITS, dtype))


@triton.jit
def _four(held, center, s, AT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    return tl.join(
        _two(held, center, s, AT, HALF, BITS, dtype), _two(held, center, s, AT + HALF // 2, HALF, BITS, dtype)
    )


@triton.jit
def _eight(held, center, s, AT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    return tl.join(
        _four(held, center, s, AT, HALF, BITS, dtype), _four(held, center, s, AT + HALF // 4, HALF, BITS, dtype)
    )


@triton.jit
def _tile(words, scale, zero, rows, start, n, k, row_words, groups, group, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
          ONE_GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
          dtype: tl.constexpr):  # fmt: skip
    """Weights [BLOCK_N rows, BLOCK_K columns from ``start``] in ``dtype``, zero outside."""
    if WHOLE:
        at = start * BITS // 32 + tl.arange(0, BLOCK_K * BITS // 32)
        held, center, s = _held(words, scale, zero, rows, at, n, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP)
        center *= s
        if BITS == 8:
            weights = _four(held, center, s, 0, 2, BITS, dtype)
        elif BITS == 4:
            weights = _eight(held, center, s, 0, 4, BITS, dtype)
        else:
            weights = tl.join(_eight(held, center, s, 0, 8, BITS, dtype), _eight(held, center, s, 1, 8, BITS, dtype))
        return tl.reshape(weights, [BLOCK_N, BLOCK_K])
    else:
        columns = start + tl.arange(0, BLOCK_K)
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
        return tl.where(inside, centered.to(tl.float32) * s, 0.0).to(dtype)


@triton.jit
def _vector(x, words, scale, zero, y, m, n, k, row_words, groups, group, per_split, BITS: tl.constexpr,
            HAS_ZERO: tl.constexpr, ONE_GROUP: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
            ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """``EVEN``: no tile of inputs reaches over the edge."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, k)
    lines = tl.arange(0, ROWS)
    if WHOLE:
        PER: tl.constexpr = 32 // BITS
        WORDS: tl.constexpr = BLOCK_K // PER
        sums = tl.zeros([ROWS, BLOCK_N, WORDS], tl.float32)
        for start in range(begin, end, BLOCK_K):
            at = start // PER + tl.arange(0, WORDS)
            held, center, s = _held(
                words, scale, zero, rows, at, n, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP
            )
            part = tl.zeros([ROWS, BLOCK_N, WORDS], tl.float32)
            inputs = tl.zeros([ROWS, WORDS], tl.float32)
            for i in tl.static_range(PER):
                there = EVEN or (lines < m)[:, None] & (at * PER + i < k)[None, :]
                a = tl.load(x + lines[:, None] * k + at[None, :] * PER + i, there, other=0.0).to(tl.float32)
                up = 23 - BITS - BITS * i
                moved = held << up if up >= 0 else held >> -up
                part += a[:, None, :] * _code(moved, BITS)[None, :, :]
                inputs += a
            # The distance to what stands for zero is the same for all codes of a word.
            sums += (part - center[None, :, :] * inputs[:, None, :]) * s[None, :, :]
        total = tl.sum(sums, 2)
    else:
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in range(begin, end, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            w = _tile(words, scale, zero, rows, start, n, k, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP, WHOLE,
                      BLOCK_N, BLOCK_K, tl.float32)  # fmt: skip
            there = (lines < m)[:, None] & (columns < k)[None, :]
            a = tl.load(x + lines[:, None] * k + columns[None, :], there, other=0.0).to(tl.float32)
            total += tl.sum(a[:, None, :] * w[None, :, :], 2)
    to = y + (tl.program_id(1) * m + lines[:, None]).to(tl.int64) * n + rows[None, :]
    tl.store(to, total, (lines < m)[:, None] & (rows < n)[None, :])


@triton.jit
def _matrix(x, words, scale, zero, y, m, n, k, row_words, groups, group, per_split, BITS: tl.constexpr,
            HAS_ZERO: tl.constexpr, ONE_GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * per_split
    lines = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, tl.minimum(begin + per_split, k), BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _tile(words, scale, zero, rows, start, n, k, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP, WHOLE,
                  BLOCK_N, BLOCK_K, x.dtype.element_ty)  # fmt: skip
        there = (lines < m)[:, None] & (columns < k)[None, :]
        a = tl.load(x + lines[:, None].to(tl.int64) * k + columns[None, :], there, other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    to = y + (tl.program_id(1) * m + lines[:, None]).to(tl.int64) * n + rows[None, :]
    tl.store(to, total, (lines < m)[:, None] & (rows < n)[None, :])


@triton.jit
def _expand(words, scale, zero, y, n, k, row_words, groups, group, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
            ONE_GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    columns = start + tl.arange(0, BLOCK_K)
    w = _tile(words, scale, zero, rows, start, n, k, row_words, groups, group, BITS, HAS_ZERO, ONE_GROUP, WHOLE,
              BLOCK_N, BLOCK_K, y.dtype.element_ty)  # fmt: skip
    to = y + rows[:, None].to(tl.int64) * k + columns[None, :]
    tl.store(to, w, (rows < n)[:, None] & (columns < k)[None, :])


def lowbit_product(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    """``x`` [M, in] (fp32, bf16 or fp16, contiguous or not) times a quantized weight → [M, out] fp32.

    ``words`` int32 [out, ceil(in·bits / 32)], ``scale`` [out, groups], ``zero`` uint8 [out, groups] or None
    (2^(bits-1)), ``group`` inputs per scale.
    """
    x = x.contiguous()
    m, k = x.shape
    n, row_words = words.shape
    held = (words, scale, words if zero is None else zero)
    whole = bits in (2, 4, 8) and group % (32 // bits) == 0
    shape = (n, k, row_words, k // group, group)

    def flags(block_k: int) -> tuple[int, bool, bool, bool]:
        """Of the kernels: bits, zeros, one group, whole words."""
        return bits, zero is not None, group % block_k == 0, whole

    def fitting(block_k: int) -> int:
        """A block that lies in one group if it can, and has whole words."""
        while block_k > 32 and group < k and group % block_k:
            block_k //= 2
        return block_k

    if m > MANY_ROWS:
        dense = torch.empty(n, k, dtype=x.dtype, device=x.device)
        block_k = fitting(128)
        _expand[triton.cdiv(n, 32), triton.cdiv(k, block_k)](*held, dense, *shape, *flags(block_k), 32, block_k)
        return F.linear(x, dense).float()
    few = m <= VECTOR_ROWS
    # As vectors, each thread has a word of some rows; as tiles, a warp some rows of a product.
    block_n, block_k = (16 if few else 64), fitting(128 if few else 64)
    if few and whole:
        block_k = 2048 // bits  # 64 words of 16 rows
    blocks = triton.cdiv(n, block_n) * (1 if few else triton.cdiv(m, 64))
    tiles = triton.cdiv(k, block_k)
    per_split = triton.cdiv(tiles, max(1, min(tiles, 2 * processors(x.device) // blocks))) * block_k
    splits = triton.cdiv(k, per_split)
    y = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    given = (x, *held, y, m, *shape, per_split)
    if few:
        even = k % block_k == 0 and m == triton.next_power_of_2(m)
        _vector[triton.cdiv(n, block_n), splits](*given, *flags(block_k), even, triton.next_power_of_2(m), block_n,
                                                 block_k, num_warps=2 if whole else 4)  # fmt: skip
    else:
        block_m = 64 if m > 32 else 32 if m > 16 else 16
        grid = (triton.cdiv(n, block_n), splits, triton.cdiv(m, block_m))
        _matrix[grid](*given, *flags(block_k), block_m, block_n, block_k)
    return y[0] if splits == 1 else y.sum(0)
