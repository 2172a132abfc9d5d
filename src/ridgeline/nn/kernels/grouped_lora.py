"""Low-rank adapters of a step's rows at once in Triton, for CUDA devices (SGMV and BGMV of Punica, arXiv:2310.18547;
S-LoRA, arXiv:2311.03285): a launch multiplies each row by its adapter's A, another by its B, and adds to the base's
output in place.

Adapters lie in slots of stacked tensors at fixed addresses. A step's rows are sorted by adapter; its blocks of rows
(slot, first row, row behind the last) are read on the device, so that launches depend on the number of rows alone and
can be captured in a CUDA graph. Sums are fp32, of inputs in a fixed number of parts, which the second launch adds in
order: without atomic operations, a row's result is the same in every run, and depends on no other row. Imported only
where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.early import wait
from ridgeline.nn.kernels.lora_stack import Stack, tile
from ridgeline.nn.kernels.quick import COMPILED, blocks, power, quick

MOST_SPLITS, SPLIT = 8, 1024
"""Most parts of the inputs, and how many are enough for one."""
FEW_ROWS = 16
"""Most rows of a program that takes more inputs and fewer outputs at a time."""
BYTES, MANY_BYTES = 512, 256
"""Bytes of a row of inputs that are taken at a time, of few rows and of more."""
OUTPUTS = 128
"""Outputs of a program."""


@quick
@triton.jit(do_not_specialize=["m", "slices", "per_split"])
def _lora_shrink(x, a, items, ranks, scales, parts, m, k, slices, capacity, per_split, EVEN: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                 EARLY: tl.constexpr = False):  # fmt: skip
    """``parts`` [splits, m, slices · capacity] of scale · x Aᵀ; see :func:`add_lora`. ``per_split``: blocks of inputs
    of a part. ``EVEN``: none reaches over the edge."""
    wait(EARLY)
    item = items + 3 * tl.program_id(0)
    slot, first, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if first >= end:  # there are fewer blocks of rows than could be
        return
    each = capacity // BLOCK_R
    of = tl.program_id(1) // each
    begin = tl.program_id(1) % each * BLOCK_R
    rank = tl.load(ranks + slot * slices + of)
    if begin >= rank:
        return
    dtype: tl.constexpr = a.dtype.element_ty if COMPILED else tl.float32
    along, line = tl.arange(0, BLOCK_K), begin + tl.arange(0, BLOCK_R)
    lines = first + tl.arange(0, BLOCK_M)
    held, there = line < rank, lines < end
    a_at = a + ((slot * slices + of).to(tl.int64) * capacity + line)[:, None] * k + along[None, :]
    x_at = x + lines[None, :].to(tl.int64) * k + along[:, None]
    start = tl.program_id(2) * per_split * BLOCK_K
    stop = tl.minimum(start + per_split * BLOCK_K, k)
    total = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    for column in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(a_at + column, held[:, None], other=0.0)
            row = tl.load(x_at + column, there[None, :], other=0.0)
        else:
            inside = column + along < stop
            w = tl.load(a_at + column, held[:, None] & inside[None, :], other=0.0)
            row = tl.load(x_at + column, there[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w.to(dtype), row.to(dtype), total, input_precision="ieee")
    total *= tl.load(scales + slot * slices + of)
    to = (tl.program_id(2).to(tl.int64) * m + lines[None, :]) * (slices * capacity) + of * capacity + line[:, None]
    tl.store(parts + to, total, there[None, :])  # beyond the rank, too: zeros


@quick
@triton.jit(do_not_specialize=["m", "slices", "splits"])
def _lora_expand(parts, b, items, ranks, y, m, n, slices, capacity, splits, first_width, second_width,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
                 EARLY: tl.constexpr = False):  # fmt: skip
    """Adds the sum of ``parts`` times B to ``y`` [m, n]; see :func:`add_lora`. ``first_width``, ``second_width``:
    outputs of the first two slices; a program's are all of one."""
    wait(EARLY)
    item = items + 3 * tl.program_id(0)
    slot, first, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if first >= end:
        return
    block = tl.program_id(1)
    until_first = tl.cdiv(first_width, BLOCK_N)
    until_second = until_first + tl.cdiv(second_width, BLOCK_N)
    of = (block >= until_first).to(tl.int32) + (block >= until_second).to(tl.int32)
    rank = tl.load(ranks + slot * slices + of)
    if rank == 0:
        return
    both = first_width + second_width
    begin = tl.where(of == 0, 0, tl.where(of == 1, first_width, both))
    behind = tl.where(of == 0, first_width, tl.where(of == 1, both, n))
    block -= tl.where(of == 0, 0, tl.where(of == 1, until_first, until_second))
    columns = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = first + tl.arange(0, BLOCK_M)
    inside, there = columns < behind, lines < end
    dtype: tl.constexpr = b.dtype.element_ty if COMPILED else tl.float32
    along = tl.arange(0, BLOCK_R)
    b_at = b + (slot.to(tl.int64) * capacity + along)[:, None] * n + columns[None, :]
    part_at = parts + lines[None, :].to(tl.int64) * (slices * capacity) + of * capacity + along[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for line in range(0, rank, BLOCK_R):
        held = line + along < rank
        w = tl.load(b_at + line * n, held[:, None] & inside[None, :], other=0.0)
        mid = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for split in range(splits):
            mid += tl.load(part_at + line + split * m * slices * capacity, there[None, :], other=0.0)
        total = tl.dot(tl.trans(w).to(dtype), mid.to(dtype), total, input_precision="ieee")
    to = y + lines[None, :].to(tl.int64) * n + columns[:, None]
    kept = inside[:, None] & there[None, :]
    tl.store(to, (tl.load(to, kept, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), kept)


def add_lora(x: Tensor, y: Tensor, items: Tensor, stack: Stack) -> None:
    """Add scale · (x Aᵀ) Bᵀ of each row's adapter to ``y`` [m, Σ outputs] in place, which the base has made of ``x``
    [m, in]; both contiguous. ``items`` int32 [blocks, 3]: slot, first row and the row behind the last one, of at most
    :func:`~ridgeline.nn.kernels.lora_stack.tile` rows; the last two are equal where there is no block. Rows in none of
    them stay as they are. Up to three slices of outputs have adapters of their own."""
    (m, k), n = x.shape, y.shape[1]
    slices, capacity, size = len(stack.widths), stack.capacity, tile(m)
    few = size <= FEW_ROWS
    splits = max(1, min(MOST_SPLITS, k // SPLIT))
    block_k = min((BYTES if few else MANY_BYTES) // x.itemsize, max(16, power(k)))
    block_r = min(capacity, 32 if few else 64)
    per_split = blocks(blocks(k, splits), block_k)
    parts = torch.empty(splits, m, slices * capacity, dtype=torch.float32, device=x.device)
    _lora_shrink[len(items), slices * capacity // block_r, splits](
        x, stack.a, items, stack.ranks, stack.scales, parts, m, k, slices, capacity, per_split, k % block_k == 0, size,
        block_r, block_k, 4 if few else 3, num_warps=4,
    )  # fmt: skip
    first, second = (*stack.widths, 0)[:2]
    _lora_expand[len(items), sum(blocks(width, OUTPUTS) for width in stack.widths)](
        parts, stack.b, items, stack.ranks, y, m, n, slices, capacity, splits, first, second, size, OUTPUTS,
        min(capacity, 32), num_warps=4 if few else 8,
    )  # fmt: skip
