"""Products with low-bit weights in Triton, for CUDA devices: weights are dequantized in registers.

Weights are stored as in :class:`ridgeline.nn.quant.codes.Stripes`: a block of inputs is cut into as many stripes as a
word has codes, and code i of word j belongs to input j of stripe i. So one shift and mask of a tile of words gives the
weights of neighboring inputs, in the layout in which tensor cores take them, without any exchange between threads.
Codes become floats by their place in a mantissa, two at a time, or are floats of fewer bits (e4m3, E2M1), which are
widened; scales multiply the sums of a group. Sums are fp32.

Up to ``MANY_ROWS`` of activations are multiplied on tensor cores with the weight as the left operand, more by PyTorch's
own product with a weight that is expanded first. Up to ``FEW_ROWS`` of them, the warps of a program divide the inputs.
Of more, where there are few blocks of outputs, the inputs are split between programs; the last of them to finish adds
the partial sums in order. The rows of a mixture's experts, sorted by expert, are multiplied in one launch, each by the
rows of the weight that are its expert's. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.e2m1 import numbers
from ridgeline.nn.kernels.e4m3 import widened
from ridgeline.nn.kernels.early import LINE, prefetch, wait
from ridgeline.nn.kernels.expert_rows import block_of_rows, most_blocks
from ridgeline.nn.kernels.lowbit_codes import centered, raised, scales_at
from ridgeline.nn.kernels.partial_sums import add_parts
from ridgeline.nn.kernels.quick import Quick, blocks, quick
from ridgeline.nn.kernels.target import capability, shared_memory
from ridgeline.spec.lowbit import MANY_ROWS


class Launch(NamedTuple):
    """How the product of up to ``rows`` rows is launched. Chosen on an H100 at the shapes of Llama 3.1 8B; those of
    stripes of 64 by what the compiler makes of them, not measured yet."""

    rows: int
    block_m: int
    """Rows of activations of a program."""
    block_n: int
    """Outputs of a program."""
    warps: int
    stages: int
    """Tiles of words that a program holds. It asks for the last of them when it is done with the first: two leave the
    memory idle meanwhile."""
    programs: int
    """Programs for each processor, which splits of the inputs make up."""
    words: int = 64
    """Words of a row that are taken at a time, a stripe at most."""


_NARROW = (Launch(8, 8, 64, 4, 4, 6), Launch(16, 16, 64, 4, 4, 4), Launch(32, 32, 128, 8, 3, 2),
           Launch(128, 64, 128, 8, 3, 2))  # fmt: skip
LAUNCHES = {
    16: _NARROW, 32: _NARROW,
    64: (Launch(8, 8, 64, 4, 3, 4), Launch(16, 16, 128, 8, 3, 2), Launch(128, 64, 128, 8, 3, 1, 32)),
}  # fmt: skip
"""By stripe."""
BYTES = (Launch(8, 8, 64, 4, 5, 4, 128), Launch(16, 16, 64, 4, 5, 3, 128), Launch(32, 32, 128, 8, 4, 2, 128),
         Launch(128, 64, 128, 8, 4, 1, 64))  # fmt: skip
"""The same where a word is a byte, by what the compiler makes of them, not measured yet."""
BYTE_STRIPE = 128
"""Most bytes of a row that are taken at a time."""
FEW_ROWS, FEW_OUTPUTS, FEW_WARPS = 8, 16, 4
"""Most rows that are multiplied by programs which have all inputs of a few outputs, these, and their warps."""
FEW_MOST = 16384
"""Most outputs of such a weight: the programs of more fill an H100 without dividing the inputs."""
FEW_STAGES = {2: 3, 4: 3, 8: 5}
"""Tiles of words that such a program holds, by the bits of a code."""
AHEAD = 256
"""Bytes of each row of a program's words, a power of two of 128-byte lines, that are fetched, with what they are
scaled by, while earlier kernels run."""
EXPANDED_ROWS = 8
"""Outputs of a program that expands a weight."""


@triton.jit
def _fetch_ahead(words, scale, rows, output, word, row_words, scale_row, groups, column, GROUP: tl.constexpr,
                 RUN: tl.constexpr, PER: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """``AHEAD`` bytes of each of a program's rows from ``word`` on, and what they are scaled by, from ``output`` and
    input ``column`` on."""
    BYTES: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // 8
    line = tl.minimum(word + tl.arange(0, AHEAD // LINE) * (LINE // BYTES), row_words - 1)
    prefetch(words + rows[:, None].to(tl.int64) * row_words + line[None, :])
    SCALES: tl.constexpr = AHEAD // BYTES * PER // RUN
    if GROUP:
        which = (column + tl.arange(0, SCALES if SCALES > 0 else 1) * RUN) // GROUP
        prefetch(scale + tl.minimum(which, groups - 1) * scale_row + output)
    else:
        prefetch(scale + output)


@quick
@triton.jit
def _tiles(x, words, scale, zero, bias, y, parts, arrived, starts, m, n, k, row_words, scale_row, groups, per_split,
           GROUP: tl.constexpr, BITS: tl.constexpr, CENTER: tl.constexpr, HAS_ZERO: tl.constexpr,
           HAS_BIAS: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr, WORDS: tl.constexpr, EVEN_N: tl.constexpr,
           EVEN_K: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
           EXPERTS: tl.constexpr = 0, EARLY: tl.constexpr = False):  # fmt: skip
    """``GROUP``: inputs with one scale; 0: all of a row. ``RUN``: those of a block in one group, whole stripes.
    ``WORDS``: of a stripe that are taken at a time. ``per_split``: blocks of a program, each ``WORDS`` words of every
    row. ``EXPERTS``: whose rows of ``x`` begin at ``starts``, each with ``n`` rows of the weight; 0: there is one."""
    PER: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // BITS
    BLOCK: tl.constexpr = STRIPE * PER
    STRIPES: tl.constexpr = RUN // STRIPE
    FLOATING: tl.constexpr = scale.dtype.element_ty == tl.uint8
    # The interpreter runs no assembly, and has no products in bf16.
    dtype: tl.constexpr = x.dtype.element_ty if ASSEMBLY else tl.float32
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines, end, of = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), m, rows
    if EXPERTS:
        wait(EARLY)  # earlier kernels count the experts' rows
        expert, line, end = block_of_rows(starts, tl.program_id(2), EXPERTS, BLOCK_M)
        if line >= end:  # there are fewer blocks of rows than could be
            return
        lines, of = line + tl.arange(0, BLOCK_M), expert * n + rows
    there = lines < end
    along = tl.arange(0, WORDS)
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, row_words // WORDS)
    held_at = words + of[:, None].to(tl.int64) * row_words + along[None, :]
    x_at = x + lines[None, :].to(tl.int64) * k + along[:, None]
    if EARLY and AHEAD and not EXPERTS:
        _fetch_ahead(words, scale, tl.minimum(rows, n - 1), tl.program_id(0) * BLOCK_N, first * WORDS, row_words,
                     scale_row, groups, first // (STRIPE // WORDS) * BLOCK, GROUP, RUN, PER, AHEAD)  # fmt: skip
    if not EXPERTS:
        wait(EARLY)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for part_of_block in tl.range(first, last, num_stages=STAGES):
        if EVEN_N:
            held = tl.load(held_at + part_of_block * WORDS)
        else:
            held = tl.load(held_at + part_of_block * WORDS, (rows < n)[:, None], other=0)
        block = part_of_block // (STRIPE // WORDS)
        column = block * BLOCK + part_of_block % (STRIPE // WORDS) * WORDS
        for g in tl.static_range(BLOCK // RUN):
            which = tl.minimum((block * BLOCK + g * RUN) // GROUP, groups - 1) if GROUP else 0
            if GROUP:
                s = scales_at(scale, which * scale_row + of, of, rows < n, WHOLE)
            center = CENTER
            if HAS_ZERO:
                center = tl.load(zero + which * scale_row + of, rows < n, other=0).to(tl.float32)[:, None]
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GROUP else total
            for i in tl.static_range(g * STRIPES, (g + 1) * STRIPES):
                inside = there[None, :]
                if not EVEN_K:
                    inside = inside & (column + i * STRIPE + along < k)[:, None]
                a = tl.load(x_at + column + i * STRIPE, inside, other=0.0)
                w = centered(held, center, i, BITS, FLOATING, CENTER == 128 and not HAS_ZERO, ASSEMBLY, dtype)
                part = tl.dot(w, a.to(dtype), part, input_precision="ieee")
            total = total + part * s[:, None] if GROUP else part
    if not GROUP:
        total *= scales_at(scale, of, of, rows < n, WHOLE)[:, None]
    inside = (rows < n)[:, None] & there[None, :]
    to = lines[None, :].to(tl.int64) * n + rows[:, None]
    if HAS_BIAS:
        base = tl.load(bias + of, rows < n, other=0.0).to(tl.float32)[:, None]
    else:
        base = 0.0
    if SPLIT:
        add_parts(parts, arrived, y, total, base, to, inside, m, n)
    else:
        tl.store(y + to, (total + base).to(y.dtype.element_ty), inside)


@quick
@triton.jit
def _few(x, words, scale, zero, bias, y, m, n, k, row_words, scale_row, groups, BITS: tl.constexpr,
         CENTER: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
         STRIPE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr,
         ONE: tl.constexpr, WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
         WARPS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """Few rows: a program has all inputs of its outputs, its warps take every ``WARPS``-th block of them, and add their
    sums at the end. ``ONE``: there is one row, in all columns of the products."""
    PER: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // BITS
    BLOCK: tl.constexpr = STRIPE * PER
    STRIPES: tl.constexpr = RUN // STRIPE
    FLOATING: tl.constexpr = scale.dtype.element_ty == tl.uint8
    dtype: tl.constexpr = x.dtype.element_ty if ASSEMBLY else tl.float32
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.arange(0, BLOCK_M)
    there = lines < m
    warp, along = tl.arange(0, WARPS), tl.arange(0, STRIPE)
    beside = warp[:, None] * BLOCK + along[None, :]
    held_at = words + rows.to(tl.int64)[None, :, None] * row_words
    held_at += (warp[:, None] * STRIPE + along[None, :])[:, None, :]
    row_at = x + beside
    x_at = row_at[:, :, None] + lines.to(tl.int64)[None, None, :] * k
    if EARLY and AHEAD:
        _fetch_ahead(words, scale, tl.minimum(rows, n - 1), tl.program_id(0) * BLOCK_N, 0, row_words, scale_row, groups,
                     0, GROUP, RUN, PER, AHEAD)  # fmt: skip
    wait(EARLY)
    total = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(0, row_words // STRIPE, WARPS, num_stages=STAGES):
        if EVEN_N and EVEN_BLOCKS:
            held = tl.load(held_at + block * STRIPE)
        else:
            mine = (block + warp < row_words // STRIPE)[:, None, None] & (rows < n)[None, :, None]
            held = tl.load(held_at + block * STRIPE, mine, other=0)
        for g in tl.static_range(BLOCK // RUN):
            which = tl.minimum(((block + warp) * BLOCK + g * RUN) // GROUP, groups - 1) if GROUP else warp * 0
            at = which[:, None] * scale_row + rows[None, :]
            if GROUP:
                s = scales_at(scale, at, rows[None, :], (rows < n)[None, :], WHOLE)
            center = CENTER
            if HAS_ZERO:
                center = tl.load(zero + at, (rows < n)[None, :], other=0).to(tl.float32)[:, :, None]
            part = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32) if GROUP else total
            for i in tl.static_range(g * STRIPES, (g + 1) * STRIPES):
                column = block * BLOCK + i * STRIPE
                inside = beside < k - column
                if ONE:
                    if EVEN_BLOCKS and EVEN_K:
                        row = tl.load(row_at + column)
                    else:
                        row = tl.load(row_at + column, inside, other=0.0)
                    a = tl.broadcast_to(row[:, :, None], [WARPS, STRIPE, BLOCK_M])
                elif EVEN_BLOCKS and EVEN_K:
                    a = tl.load(x_at + column, there[None, None, :], other=0.0)
                else:
                    a = tl.load(x_at + column, inside[:, :, None] & there[None, None, :], other=0.0)
                w = centered(held, center, i, BITS, FLOATING, CENTER == 128 and not HAS_ZERO, ASSEMBLY, dtype)
                part = tl.dot(w, a.to(dtype), part, input_precision="ieee")
            total = total + part * s[:, :, None] if GROUP else part
    whole = tl.sum(total, 0)
    if not GROUP:
        whole *= scales_at(scale, rows, rows, rows < n, WHOLE)[:, None]
    if HAS_BIAS:
        whole += tl.load(bias + rows, rows < n, other=0.0).to(tl.float32)[:, None]
    to = lines[None, :].to(tl.int64) * n + rows[:, None]
    tl.store(y + to, whole.to(y.dtype.element_ty), (rows < n)[:, None] & there[None, :])


@triton.jit
def _expand(words, scale, zero, y, n, k, row_words, scale_row, groups, group, BITS: tl.constexpr,
            CENTER: tl.constexpr, HAS_ZERO: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """The weight [n, k] in the dtype of ``y``."""
    PER: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // BITS
    BLOCK: tl.constexpr = STRIPE * PER
    STRIPES: tl.constexpr = RUN // STRIPE
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(0)
    along = tl.arange(0, STRIPE)
    inside = (rows < n)[:, None]
    held = tl.load(words + rows[:, None].to(tl.int64) * row_words + block * STRIPE + along[None, :], inside, other=0)
    if words.dtype.element_ty != tl.uint8:
        held = held.to(tl.uint32, bitcast=True)
    for g in tl.static_range(BLOCK // RUN):
        which = tl.minimum((block * BLOCK + g * RUN) // group, groups - 1)
        s = scales_at(scale, which * scale_row + rows, rows, rows < n, False)[:, None]
        center = CENTER
        if HAS_ZERO:
            center = tl.load(zero + which * scale_row + rows, rows < n, other=0).to(tl.float32)[:, None]
        for i in tl.static_range(g * STRIPES, (g + 1) * STRIPES):
            if words.dtype.element_ty == tl.uint8:
                w = widened(held, tl.float32) * s
            elif scale.dtype.element_ty == tl.uint8:
                w = numbers(held, i, tl.float32) * s
            else:
                w = (raised(held, i, BITS) - (center + (1 << BITS))) * s
            columns = block * BLOCK + i * STRIPE + along
            to = y + rows[:, None].to(tl.int64) * k + columns[None, :]
            tl.store(to, w.to(y.dtype.element_ty), inside & (columns < k)[None, :])


class _Blocks(NamedTuple):
    """How a weight's codes stand in its words."""

    bits: int
    """Of a code."""
    bytes: int
    """Of a word."""
    stripe: int
    run: int
    """Inputs with one scale that stand together in every block of words."""

    @property
    def per(self) -> int:
        """Codes of a word."""
        return 8 * self.bytes // self.bits

    @property
    def inputs(self) -> int:
        """Of a block."""
        return self.stripe * self.per


def _blocks(words: Tensor, width: int, group: int, bits: int, stripe: int) -> _Blocks:
    inputs = stripe * 8 * words.itemsize // bits
    return _Blocks(bits, words.itemsize, stripe, gcd(group, inputs) if group < width else inputs)


def _whole(scale: Tensor) -> bool:
    """Whether scales [groups, out] can be read as words, of several outputs."""
    narrow, row = scale.dtype in (torch.float16, torch.uint8), scale.shape[1] * scale.itemsize
    return narrow and scale.stride(0) * scale.itemsize % 4 == row % 4 == scale.data_ptr() % 4 == 0


def _few_fit(b: _Blocks, one: bool) -> bool:
    """Whether the tiles of a program of :func:`_few` fit into shared memory; inputs, codes and scales of a warp."""
    each = b.inputs * 2 * (1 if one else FEW_ROWS) + FEW_OUTPUTS * (b.bytes * b.stripe + 4 * b.inputs // b.run)
    return (FEW_STAGES[b.bits] - 1) * FEW_WARPS * each <= shared_memory()


def _launch(m: int, b: _Blocks) -> Launch:
    """How ``m`` rows are multiplied by :func:`_tiles`: in registers and shared memory that the device has."""
    choices = BYTES if b.bytes == 1 else LAUNCHES[b.stripe]
    how, device, bits, block = next(c for c in choices if m <= c.rows), capability(), b.bits, b.inputs
    large = block >= 512 or (block >= 256 and block // b.run > 4)
    if (large and device != 90) or (bits < 8 and device >= 100):
        # Ampere's registers would not do, and Triton 3.6 and 3.7 make kernels of nothing for Blackwell.
        how = how._replace(block_m=min(how.block_m, 16 if bits == 2 else 32))
    how = how._replace(words=min(b.stripe, how.words))
    rest = how.block_n * (b.bytes * how.words + 4 * block // b.run)
    while how.stages > 2:
        inputs, copies = how.words * b.per * how.block_m * 2, how.stages - 1
        held = copies + (device in (0, 90))  # Hopper's tensor cores read one tile of inputs while others are on the way
        if held * inputs + copies * rest + 1024 <= shared_memory():
            break
        how = how._replace(block_m=32) if how.block_m > 32 else how._replace(stages=copies)
    return how


def expanded(words: Tensor, scale: Tensor, zero: Tensor | None, width: int, bits: int, center: int, group: int,
             stripe: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """The weight [out, width] in ``dtype``; arguments as of :func:`lowbit_product`."""
    n, row_words = words.shape
    y = torch.empty(n, width, dtype=dtype, device=words.device)
    _expand[row_words // stripe, triton.cdiv(n, EXPANDED_ROWS)](
        words, scale, words if zero is None else zero, y, n, width, row_words, scale.stride(0), len(scale), group, bits,
        float(center), zero is not None, _blocks(words, width, group, bits, stripe).run, stripe, EXPANDED_ROWS,
    )  # fmt: skip
    return y


def lowbit_product(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, center: int, group: int,
                   stripe: int, arrived: Tensor, bias: Tensor | None = None,
                   dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """``x`` [M, in] (fp32, bf16 or fp16, contiguous or not) times a quantized weight, plus ``bias`` [out] → [M, out] in
    ``dtype`` (that of ``x``).

    ``words`` int32 [out, blocks · stripe] of ``bits`` (2, 4 or 8), ``scale`` [groups, out], ``zero`` uint8
    [groups, out] or None (``center``), both with rows of one stride, ``group`` inputs per scale, a multiple of
    ``stripe``. Scales in uint8 are exponents (E8M0), of codes of 4 bits that are E2M1 numbers. ``arrived`` int32:
    zeros, which every call leaves behind, at least one for each tile of outputs; calls at one time need their own.
    """
    dtype = dtype or x.dtype
    m, k = x.shape
    n, row_words = words.shape
    if not m:
        return torch.empty(0, n, dtype=dtype, device=x.device)
    if zero is not None and zero.stride(0) != scale.stride(0):
        scale, zero = scale.contiguous(), zero.contiguous()
    if m > MANY_ROWS or x.dtype == torch.float32:
        x = x.to(torch.promote_types(x.dtype, dtype))  # fp32 where that is asked for: nothing is rounded
        dense = expanded(words, scale, zero, k, bits, center, group, stripe, x.dtype)
        return F.linear(x, dense, None if bias is None else bias.to(x.dtype)).to(dtype)
    x = x.contiguous()
    held = _blocks(words, k, group, bits, stripe)
    one = m == 1 and stripe >= 64  # a thread of a warp loads two inputs at least: copies are of 32 bits or more
    if m <= FEW_ROWS and n <= FEW_MOST and _few_fit(held, one):
        y = torch.empty(m, n, dtype=dtype, device=x.device)
        _few[blocks(n, FEW_OUTPUTS),](
            x, words, scale, words if zero is None else zero, y if bias is None else bias, y, m, n, k, row_words,
            scale.stride(0), len(scale), bits, float(center), zero is not None, bias is not None,
            group if group < k else 0, held.run, stripe, n % FEW_OUTPUTS == 0, row_words // stripe % FEW_WARPS == 0,
            k == held.per * row_words, one, _whole(scale), isinstance(_few, Quick), 8, FEW_OUTPUTS, FEW_WARPS,
            FEW_STAGES[bits], AHEAD, num_warps=FEW_WARPS,
        )  # fmt: skip
        return y
    return launch_tiles(x, words, scale, zero, bits, center, group, stripe, arrived, bias, dtype)


def launch_tiles(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, center: int, group: int,
                 stripe: int, arrived: Tensor, bias: Tensor | None, dtype: torch.dtype, starts: Tensor | None = None,
                 experts: int = 1) -> Tensor:  # fmt: skip
    """The product by :func:`_tiles`: that of :func:`lowbit_product`, of contiguous rows in 16 bits; with ``starts``,
    that of :func:`~ridgeline.nn.kernels.grouped_codes.grouped_product`."""
    m, k = x.shape
    n, row_words = len(words) // experts, words.shape[1]
    held = _blocks(words, k, group, bits, stripe)
    how = _launch(blocks(m, experts), held)
    tiles = blocks(n, how.block_n), blocks(m, how.block_m) if starts is None else most_blocks(m, experts, how.block_m)
    steps = row_words // how.words
    wanted = round(how.programs * processors(x.device) / (tiles[0] * tiles[1]))
    per_split = blocks(steps, max(1, min(steps, wanted)))
    if arrived.numel() < tiles[0] * tiles[1]:  # of more tiles than there are counters for, a program has all inputs
        per_split = steps
    splits = blocks(steps, per_split)
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else y
    _tiles[tiles[0], splits, tiles[1]](
        x, words, scale, words if zero is None else zero, y if bias is None else bias, y, parts, arrived,
        arrived if starts is None else starts, m, n, k, row_words, scale.stride(0), len(scale), per_split,
        group if group < k else 0, bits, float(center), zero is not None, bias is not None, held.run, stripe, how.words,
        n % how.block_n == 0, k == held.per * row_words, _whole(scale), splits > 1, isinstance(_tiles, Quick),
        how.block_m, how.block_n, how.stages, AHEAD, 0 if starts is None else len(starts) - 1, num_warps=how.warps,
    )  # fmt: skip
    return y


def float8_product(x: Tensor, codes: Tensor, scales: Tensor, arrived: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [M, in] in 16 bits times a weight in e4m3 ``codes`` [out, in], none of them NaN, plus ``bias`` [out]
    → [M, out]: up to ``MANY_ROWS`` rows without any rounding but of the result.

    ``in`` a multiple of 16; ``scales`` fp32 [out, 1], by which codes are multiplied; ``arrived`` as of
    :func:`lowbit_product`.
    """
    k = codes.shape[1]
    return lowbit_product(x, codes.view(torch.uint8), scales.view(1, -1), None, 8, 0, k, gcd(k, BYTE_STRIPE), arrived,
                          bias)  # fmt: skip
