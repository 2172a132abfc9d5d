"""AdaLomo's update (arXiv:2310.10195, Algorithm 1) in Triton: four launches for a matrix, or a stack of them, and one
for a vector. Imported only where Triton is installed.

A matrix is read three times: for the sums of its rows' and columns' squared gradients, for the sizes of the update and
of the parameter, and to be updated. Parts of sums are added in one order: there are no atomic operations.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.quick import blocks, power, quick, warps

TALL, WIDE = 64, 128
"""Rows and columns of a tile whose squares are summed."""
ROWS, COLUMNS = 16, 128
"""The same of one that is updated."""
LINES, PARTS = 128, 16
"""Rows or columns of which a program adds the parts, and parts that it adds at once."""
PER_PROCESSOR = 4
"""Programs of an update for each processor of a GPU."""
LONGEST = 16384
"""Most numbers of a vector: one program holds it."""


@quick
@triton.jit
def _sum_squares(grad, row_parts, column_parts, rows, columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Of each tile of a matrix: ``row_parts`` [matrices, tiles across, rows], ``column_parts`` [matrices, tiles down,
    columns]."""
    matrix = tl.program_id(2).to(tl.int64)
    down, across = tl.program_id(0), tl.program_id(1)
    row, column = down * TALL + tl.arange(0, TALL), across * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (matrix * rows + row)[:, None] * columns + column[None, :]
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    g *= g
    tl.store(row_parts + (matrix * tl.num_programs(1) + across) * rows + row, tl.sum(g, 1), row < rows)
    tl.store(column_parts + (matrix * tl.num_programs(0) + down) * columns + column, tl.sum(g, 0), column < columns)


@triton.jit
def _add_parts(parts, factor, lines, count, first, size, rest, tiny, LINES: tl.constexpr, PARTS: tl.constexpr):
    """Lerp a ``factor`` [lines] to the means over ``size`` numbers, whose sums have ``count`` parts [count, lines]."""
    line, part = first + tl.arange(0, LINES), tl.arange(0, PARTS)
    total = tl.zeros([PARTS, LINES], tl.float32)
    for start in range(0, count, PARTS):
        there = (start + part < count)[:, None] & (line < lines)[None, :]
        total += tl.load(parts + (start + part).to(tl.int64)[:, None] * lines + line[None, :], there, other=0.0)
    mean = tl.sum(total, 0) / size + tiny
    before = tl.load(factor + line, line < lines, other=0.0)
    tl.store(factor + line, before + rest * (mean - before), line < lines)


@quick
@triton.jit
def _average(row_parts, column_parts, row_factor, column_factor, rows, columns, across, down, row_programs, rest, tiny,
             LINES: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Both factors of a matrix, those of the rows by the first programs."""
    matrix, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if program < row_programs:
        _add_parts(row_parts + matrix * across * rows, row_factor + matrix * rows, rows, across, program * LINES,
                   columns, rest, tiny, LINES, PARTS)  # fmt: skip
    else:
        _add_parts(column_parts + matrix * down * columns, column_factor + matrix * columns, columns, down,
                   (program - row_programs) * LINES, rows, rest, tiny, LINES, PARTS)  # fmt: skip


@triton.jit
def _tile(weight, grad, row_factor, column_factor, rows, columns, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile: its place, what of it is inside, the parameter, g / √(r c), and the sum of r where columns begin."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    r = tl.load(row_factor + row, row < rows, other=1.0)
    c = tl.load(column_factor + column, column < columns, other=1.0)
    u = tl.load(grad + at, inside, other=0.0).to(tl.float32) * tl.rsqrt(r)[:, None] * tl.rsqrt(c)[None, :]
    w = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    total = tl.sum(tl.where((row < rows) & (tile % across == 0), r, 0.0), 0)
    return at, inside, w, u, total


@quick
@triton.jit
def _sizes(weight, grad, row_factor, column_factor, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``sums`` [matrices, 3, programs]: parts of the sums of (g / √(r c))², of the squared parameter, and of r."""
    matrix, program, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    weight, grad = weight + matrix * rows * columns, grad + matrix * rows * columns
    row_factor, column_factor = row_factor + matrix * rows, column_factor + matrix * columns
    of_update = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_rows = 0.0
    for tile in range(program, tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS), programs):
        _, _, w, u, r = _tile(weight, grad, row_factor, column_factor, rows, columns, tile, ROWS, COLUMNS)
        of_update += u * u
        of_weight += w * w
        of_rows += r
    place = sums + matrix * 3 * programs + program
    tl.store(place, tl.sum(tl.sum(of_update, 1), 0))
    tl.store(place + programs, tl.sum(tl.sum(of_weight, 1), 0))
    tl.store(place + 2 * programs, of_rows)


@triton.jit
def _length(of_update, of_weight, size, scale, lr, least):
    """η max(ε, RMS(θ)) / max(1, RMS(u)) of u, ``scale`` times what ``of_update`` is the sum of squares of. NaN where
    one of both is, which a GPU's maximum leaves out."""
    rms = tl.sqrt(of_update / size) * scale
    least_size = tl.maximum(tl.sqrt(of_weight / size), least, propagate_nan=tl.PropagateNan.ALL)
    return lr * least_size / tl.maximum(rms, 1.0, propagate_nan=tl.PropagateNan.ALL) * scale


@quick
@triton.jit
def _update_matrix(weight, grad, row_factor, column_factor, sums, rows, columns, size, lr, least,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """θ ← θ - ``_length`` · g / √(r c), with the parts of the sums of as many programs."""
    matrix, program, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    part = tl.arange(0, PARTS)
    place, there = sums + matrix * 3 * programs + part, part < programs
    of_update = tl.sum(tl.load(place, there, other=0.0), 0)
    of_weight = tl.sum(tl.load(place + programs, there, other=0.0), 0)
    scale = tl.sqrt(tl.sum(tl.load(place + 2 * programs, there, other=0.0), 0) / rows)
    length = _length(of_update, of_weight, size, scale, lr, least)
    weight, grad = weight + matrix * rows * columns, grad + matrix * rows * columns
    row_factor, column_factor = row_factor + matrix * rows, column_factor + matrix * columns
    for tile in range(program, tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS), programs):
        at, inside, w, u, _ = _tile(weight, grad, row_factor, column_factor, rows, columns, tile, ROWS, COLUMNS)
        tl.store(weight + at, (w - length * u).to(weight.dtype.element_ty), inside)


@quick
@triton.jit
def _update_vector(weight, grad, square, n, size, rest, tiny, lr, least, SIZE: tl.constexpr):
    """The same of a vector, whose mean of g² is kept as it is: read by all threads, of which several hold the same
    numbers of a short vector, before one of them writes it."""
    at = tl.arange(0, SIZE)
    g = tl.load(grad + at, at < n, other=0.0).to(tl.float32)
    v = tl.load(square + at, at < n, other=1.0)
    tl.debug_barrier()
    v += rest * (g * g + tiny - v)
    tl.store(square + at, v, at < n)
    u = g * tl.rsqrt(tl.where(at < n, v, 1.0))
    w = tl.load(weight + at, at < n, other=0.0).to(tl.float32)
    length = _length(tl.sum(u * u, 0), tl.sum(w * w, 0), size, 1.0, lr, least)
    tl.store(weight + at, (w - length * u).to(weight.dtype.element_ty), at < n)


def update_matrix(
    weight: Tensor, grad: Tensor, r: Tensor, c: Tensor, rest: float, tiny: float, lr: float, least: float
) -> None:
    """Update ``weight`` [..., rows, columns] and its factors ``r`` [..., rows] and ``c`` [..., columns] (fp32), all
    contiguous, in place. ``rest``: 1 - β; ``tiny`` is added to squared gradients."""
    rows, columns = weight.shape[-2:]
    matrices = weight.numel() // (rows * columns)
    down, across = blocks(rows, TALL), blocks(columns, WIDE)
    new = torch.empty(matrices * (across * rows + down * columns), dtype=torch.float32, device=weight.device)
    of_rows, of_columns = new[: matrices * across * rows], new[matrices * across * rows :]
    _sum_squares[(down, across, matrices)](grad, of_rows, of_columns, rows, columns, TALL, WIDE, num_warps=8)
    programs = blocks(rows, LINES)
    _average[(programs + blocks(columns, LINES), matrices)](
        of_rows, of_columns, r, c, rows, columns, across, down, programs, rest, tiny, LINES, PARTS
    )
    programs = min(blocks(rows, ROWS) * blocks(columns, COLUMNS), PER_PROCESSOR * processors(weight.device))
    sums = torch.empty(matrices, 3, programs, dtype=torch.float32, device=weight.device)
    _sizes[(programs, matrices)](weight, grad, r, c, sums, rows, columns, ROWS, COLUMNS)
    _update_matrix[(programs, matrices)](
        weight, grad, r, c, sums, rows, columns, float(rows * columns), lr, least, ROWS, COLUMNS, power(programs)
    )


def update_vector(
    weight: Tensor, grad: Tensor, square: Tensor, rest: float, tiny: float, lr: float, least: float
) -> None:
    """The same of a vector of at most :data:`LONGEST` numbers and its mean of g² (fp32)."""
    n, size = weight.numel(), power(weight.numel())
    _update_vector[(1,)](weight, grad, square, n, float(n), rest, tiny, lr, least, size, num_warps=warps(size))
