"""Products of a few rows, up to 128, with a weight in 16 bits, or in e4m3 codes with one in such codes, in Triton, for
Hopper: steps of several sequences read each weight once and wait for little else.

The weight is the left operand of the tensor cores, so that 64 of its outputs and 16 rows or more are one instruction;
both operands are read from shared memory, into which they are copied some blocks ahead. Where outputs make too few
programs, inputs are split between several; the last of them to finish adds the partial sums in order. Into how many is
chosen by the weight's shape, so that a row's result depends neither on the other rows nor, within a range of
:data:`LAUNCHES`, on their number. Sums leave the tensor cores, which keep fewer bits than fp32 of them, after every
block of inputs. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.early import LINE, prefetch, wait
from ridgeline.nn.kernels.partial_sums import add_parts
from ridgeline.nn.kernels.quick import Quick, blocks, quick


class Launch(NamedTuple):
    """How the product of up to ``rows`` rows is launched. By what the compiler makes of them, not measured yet."""

    rows: int
    """Also those of a program's tile: a power of two, 16 at least."""
    outputs: int
    """Of a program: a multiple of the 64 that four warps multiply by at a time."""
    bytes: int
    """Of a row of the weight in a block."""
    warps: int
    stages: int
    """Blocks in shared memory."""
    programs: int
    """Most programs for each processor that splits of the inputs make up."""


LAUNCHES = (Launch(16, 64, 128, 4, 6, 3), Launch(32, 64, 128, 4, 5, 3), Launch(64, 128, 128, 8, 4, 2),
            Launch(128, 128, 128, 8, 5, 1))  # fmt: skip
MOST = LAUNCHES[-1].rows
"""Most rows."""
ALIGNED = 16
"""Bytes of which operands' rows must have a multiple, so that they are read 128 bits at a time."""
AHEAD = 256
"""Bytes of each row of the weight, a power of two of 128-byte lines, that are fetched while earlier kernels run."""


@quick
@triton.jit(do_not_specialize=["per_split"])
def _product_of_rows(x, w, x_scales, scales, bias, y, partial, arrived, m, n, parts, per_split,
                     CODED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
                     NATIVE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
                     EACH: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
                     EARLY: tl.constexpr = False):  # fmt: skip
    """``CODED``: operands are codes, to be multiplied by ``x_scales`` [m] and ``scales`` [n]. ``parts``: of ``EACH``
    inputs. ``per_split``: blocks of inputs of a program. ``EVEN``: no block of inputs reaches over the edge.
    ``NATIVE``: the interpreter has no products of less than 32 bits."""
    k = parts * EACH  # by which the compiler knows how rows are aligned
    of = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    from_row = w + tl.minimum(of, n - 1).to(tl.int64)[:, None] * k
    lines = tl.arange(0, ROWS)
    there = (lines < m)[None, :]
    along = tl.arange(0, BLOCK)
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, (k + BLOCK - 1) // BLOCK)
    if EARLY and AHEAD:
        PER_LINE: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(first * BLOCK + tl.arange(0, AHEAD // LINE) * PER_LINE, k - 1)
        prefetch(from_row + line[None, :])
    wait(EARLY)
    from_w, from_x = from_row + along[None, :], x + lines[None, :] * k + along[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        start = block * BLOCK
        if EVEN:
            held = tl.load(from_w + start)
            a = tl.load(from_x + start, there, other=0.0)
        else:
            inside = start + along < k
            held = tl.load(from_w + start, inside[None, :], other=0.0)
            a = tl.load(from_x + start, there & inside[:, None], other=0.0)
        if not NATIVE:
            total = tl.dot(held.to(tl.float32), a.to(tl.float32), total, input_precision="ieee")
        elif CODED:  # not with ``max_num_imprecise_acc``, for which sums are read before they are waited for
            total += tl.dot(held, a)
        else:
            total = tl.dot(held, a, total)
    exists = of < n
    if CODED:
        total *= tl.load(scales + of, exists, other=0.0)[:, None]
        total *= tl.load(x_scales + lines, lines < m, other=0.0)[None, :]
    if HAS_BIAS:
        base = tl.load(bias + of, exists, other=0.0).to(tl.float32)[:, None]
    else:
        base = 0.0
    inside_y = exists[:, None] & there
    to = lines[None, :].to(tl.int64) * n + of[:, None]
    if SPLIT:
        add_parts(partial, arrived, y, total, base, to, inside_y, m, n)
    else:
        tl.store(y + to, (total + base).to(y.dtype.element_ty), inside_y)


def product_of_rows(
    x: Tensor, weight: Tensor, arrived: Tensor, bias: Tensor | None = None, how: Launch | None = None
) -> Tensor:
    """``x`` [m, k] of up to ``MOST`` rows times ``weight`` [n, k], plus ``bias`` [n] → [m, n]; all contiguous, of one
    dtype (bf16 or fp16), rows a multiple of ``ALIGNED`` bytes. ``arrived``: as below."""
    return _product(x, None, weight, None, arrived, x.dtype, bias, how)


def product_of_coded_rows(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, arrived: Tensor, dtype: torch.dtype,
    bias: Tensor | None = None, how: Launch | None = None,
) -> Tensor:  # fmt: skip
    """``x`` [m, k] of up to ``MOST`` rows times a weight [n, k], plus ``bias`` [n] (bf16 or fp16) → [m, n] in
    ``dtype``. Both are e4m3 codes, contiguous, k a multiple of ``ALIGNED``, and are to be multiplied by ``x_scales``
    [m, 1] and ``scales`` [n, 1] (fp32). ``arrived`` int32: zeros, which every call leaves behind, one for 64 outputs at
    least; calls at one time need their own."""
    return _product(x, x_scales, codes, scales, arrived, dtype, bias, how)


def _product(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor | None, arrived: Tensor, dtype: torch.dtype,
    bias: Tensor | None, how: Launch | None,
) -> Tensor:  # fmt: skip
    (m, k), n = x.shape, len(weight)
    how = how or next(launch for launch in LAUNCHES if m <= launch.rows)
    block, each = how.bytes // weight.itemsize, ALIGNED // weight.itemsize
    tiles, steps = blocks(n, how.outputs), blocks(k, block)
    per_split = blocks(steps, max(1, min(steps, how.programs * processors(x.device) // tiles)))
    splits = blocks(steps, per_split)
    assert splits == 1 or arrived.numel() >= tiles
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else y
    _product_of_rows[tiles, splits](
        x, weight, y if x_scales is None else x_scales, y if scales is None else scales, y if bias is None else bias, y,
        partial, arrived, m, n, k // each, per_split, scales is not None, bias is not None, k % block == 0, splits > 1,
        isinstance(_product_of_rows, Quick), how.rows, how.outputs, block, each, how.stages, AHEAD, num_warps=how.warps,
    )  # fmt: skip
    return y
