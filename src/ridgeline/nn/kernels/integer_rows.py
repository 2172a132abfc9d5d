"""Matrices in int8 codes with a scale and some fp32 outliers in each row, in Triton: the matrix itself, and Lion's step
on codes, one launch each and a program for each row. Imported only where Triton is installed.

A row's outliers are written behind a barrier of its program. In Lion's step the code -128, which no weight has, marks
their columns until the row's new codes are stored.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.quick import power, quick

SIZE = 2048
"""Numbers of a row that a program has at once, 16 in each of 128 threads."""
MARK = tl.constexpr(-128)
LEAST = tl.constexpr(0x0DA24260)
"""The bits of 1e-30: no row's largest magnitude is taken to be less."""


@quick
@triton.jit
def _expand_rows(codes, scale, columns, outliers, out, width, count, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Products are rounded as those of PyTorch's operators: the scale to the dtype of ``out`` first."""
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(scale + row).to(out.dtype.element_ty).to(tl.float32)
    for start in range(0, width, SIZE):
        at = start + tl.arange(0, SIZE)
        value = tl.load(codes + row * width + at, at < width, other=0).to(tl.float32) * by
        tl.store(out + row * width + at, value.to(out.dtype.element_ty), at < width)
    tl.debug_barrier()
    i = tl.arange(0, COUNT)
    column = tl.load(columns + row * count + i, i < count, other=0)
    value = tl.load(outliers + row * count + i, i < count, other=0.0)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), i < count)


@triton.jit
def _bits(x):
    """Of magnitudes, in whose order NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(bits):
    """What brings a row's largest magnitude to 127."""
    return tl.max(bits, 0).to(tl.float32, bitcast=True) / 127.0


@triton.jit
def _numbers(grad, momentum, codes, at, width):
    """Gradients, momentum in codes of its scale, and codes of weights, at some columns of a row."""
    inside = at < width
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    return g, tl.load(momentum + at, inside, other=0).to(tl.float32), tl.load(codes + at, inside, other=MARK)


@triton.jit
def _moved(g, m, scale, m_scale, lr, beta1_rest, beta2_rest):
    """(step, new momentum) of numbers: gradients are rounded to codes first, to nearest and even ones."""
    g = (g / scale + 12582912.0 - 12582912.0) * scale
    m *= m_scale
    direction = m - (m - g) * beta1_rest
    step = tl.where(direction > 0, -lr, tl.where(direction < 0, lr, direction * 0.0))
    return step, m + beta2_rest * (g - m)


@triton.jit
def _rounded(x, noise):
    """To one of the two integers beside each number, within the codes."""
    return tl.minimum(tl.maximum(tl.floor(x + noise), -127.0), 127.0)


@quick
@triton.jit
def _lion_rows(grad, codes, scale, columns, outliers, momentum, m_scale, m_noise, noise, squares, width, count, lr,
               keep, beta1_rest, beta2_rest, headroom, SIZE: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad, codes, momentum = grad + row * width, codes + row * width, momentum + row * width
    noise, m_noise = noise + row * width, m_noise + row * width
    i = tl.arange(0, COUNT)
    few = i < count
    column = tl.load(columns + row * count + i, few, other=0)
    g_few = tl.load(grad + column, few, other=0.0).to(tl.float32)
    m_few = tl.load(momentum + column, few, other=0).to(tl.float32)
    tl.store(codes + column, tl.full([COUNT], MARK, tl.int8), few)
    most, total = tl.full([SIZE], LEAST, tl.int32), tl.zeros([SIZE], tl.float32)
    for start in range(0, width, SIZE):
        at = start + tl.arange(0, SIZE)
        g = tl.load(grad + at, at < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, _bits(g))
        total += g * g
    g_scale, w_scale, before = _scale_of(most), tl.load(scale + row), tl.load(m_scale + row)
    tl.store(squares + row, tl.sum(total, 0))
    tl.debug_barrier()  # marks are there, and what they were made from is read
    of_m, of_w = tl.full([SIZE], LEAST, tl.int32), tl.zeros([SIZE], tl.int32)
    for start in range(0, width, SIZE):
        at = start + tl.arange(0, SIZE)
        g, m, code = _numbers(grad, momentum, codes, at, width)
        step, m = _moved(g, m, g_scale, before, lr, beta1_rest, beta2_rest)
        of_m = tl.maximum(of_m, _bits(m))
        of_w = tl.maximum(of_w, _bits(tl.where(code == MARK, 0.0, code.to(tl.float32) * keep + step / w_scale)))
    after, needed = _scale_of(of_m), _scale_of(of_w)
    grow = tl.where(needed > 1.0, needed * headroom, 1.0)
    for start in range(0, width, SIZE):
        at = start + tl.arange(0, SIZE)
        g, m, code = _numbers(grad, momentum, codes, at, width)
        step, m = _moved(g, m, g_scale, before, lr, beta1_rest, beta2_rest)
        w = (code.to(tl.float32) * keep + step / w_scale) / grow
        m = _rounded(m / after, tl.load(m_noise + at, at < width, other=0.0))
        w = _rounded(w, tl.load(noise + at, at < width, other=0.0))
        tl.store(momentum + at, m.to(tl.int8), at < width)
        tl.store(codes + at, tl.where(code == MARK, 0.0, w).to(tl.int8), at < width)
    tl.store(scale + row, w_scale * grow)
    tl.store(m_scale + row, after)
    step, _ = _moved(g_few, m_few, g_scale, before, lr, beta1_rest, beta2_rest)
    value = tl.load(outliers + row * count + i, few, other=0.0)
    tl.store(outliers + row * count + i, value * keep + step, few)


class Rows(NamedTuple):
    """Some rows of a matrix [rows, in], all contiguous."""

    codes: Tensor
    """int8 [rows, in]; zero where outliers are."""
    scale: Tensor
    """fp32 [rows, 1]."""
    columns: Tensor
    """int32 [rows, k]."""
    outliers: Tensor
    """fp32 [rows, k]."""


def expand_rows(rows: Rows, out: Tensor) -> None:
    """Write the matrix ``out`` [rows, in]."""
    width, count = rows.codes.shape[1], rows.columns.shape[1]
    _expand_rows[(len(rows.codes),)](*rows, out, width, count, min(SIZE, power(width)), power(count))


def lion_rows(
    rows: Rows, grad: Tensor, momentum: Tensor, momentum_scale: Tensor, noise: tuple[Tensor, Tensor],
    numbers: tuple[float, ...],
) -> Tensor:  # fmt: skip
    """Update rows and their momentum (int8 [rows, in], fp32 [rows, 1]) in place, by a gradient [rows, in] that is
    rounded to codes first; returns the sum of its squares in each row (fp32 [rows]). ``noise``: fp32 numbers in [0, 1)
    [rows, in] by which momentum and weights are rounded. ``numbers``: η, 1 - η λ, 1 - β₁, 1 - β₂, and the factor by
    which a scale grows beyond what is needed. A gradient that is not finite makes the scale of its row's momentum
    NaN."""
    width, count = rows.codes.shape[1], rows.columns.shape[1]
    squares = torch.empty(len(rows.codes), dtype=torch.float32, device=grad.device)
    _lion_rows[(len(squares),)](grad, *rows, momentum, momentum_scale, *noise, squares, width, count, *numbers,
                                min(SIZE, power(width)), power(count))  # fmt: skip
    return squares
