"""SwiGLU beside float8 codes, in Triton: forward, largest magnitudes are found as its result is written; backward,
codes of its gradient are made from what the gradient is made of, without the gradient itself. Imported only where
Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.float8 import _power, _scale, _scaled, opaque
from ridgeline.nn.kernels.gpu import swiglu_gradients
from ridgeline.nn.kernels.gpu_norms import magnitudes
from ridgeline.nn.kernels.peaks import PER_PROCESSOR, GatedGradient, Peaks, Wish, room

TALL, WIDE = 128, 64
"""Rows and columns of a tile, as of other codes."""
LOW = 64
"""Rows of a tile whose peaks are found from three tensors: with more, fewer programs than four fit a processor."""


@triton.jit
def _swiglu_peaks(x, y, first, most_of_columns, rows, n, LINES: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """``y`` = silu(gate) · up of x = [gate | up], and its largest magnitudes."""
    across = tl.cdiv(n, WIDE)
    most = tl.zeros([TALL], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TALL) * across, tl.num_programs(0)):
        i = (tile // across).to(tl.int64) * TALL + tl.arange(0, TALL)
        j = (tile % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
        at, inside = i[:, None] * 2 * n + j[None, :], (i < rows)[:, None] & (j < n)[None, :]
        g = tl.load(x + at, inside, other=0.0).to(tl.float32)
        u = tl.load(x + at + n, inside, other=0.0).to(tl.float32)
        out = (g * tl.sigmoid(g) * u).to(y.dtype.element_ty)
        tl.store(y + i[:, None] * n + j[None, :], out, inside)
        bits = magnitudes(out)
        if LINES:
            tl.atomic_max(first + i, tl.max(bits, 1), i < rows, sem="relaxed")
            tl.atomic_max(most_of_columns + j, tl.max(bits, 0), j < n, sem="relaxed")
        else:
            most = tl.maximum(most, tl.max(bits, 1))
    if not LINES:
        tl.store(first + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _gradient_tile(dy, x, i, j, rows, n):
    """A tile of the gradients of gate and up, rounded as they would be written."""
    at, inside = i[:, None] * 2 * n + j[None, :], (i < rows)[:, None] & (j < n)[None, :]
    d = tl.load(dy + i[:, None] * n + j[None, :], inside, other=0.0).to(tl.float32)
    g = tl.load(x + at, inside, other=0.0).to(tl.float32)
    u = tl.load(x + at + n, inside, other=0.0).to(tl.float32)
    of_gate, of_up = swiglu_gradients(d, g, u)
    return of_gate.to(x.dtype.element_ty), of_up.to(x.dtype.element_ty)


@triton.jit
def _peaks_of_gated(dy, x, first, most_of_columns, rows, n, LINES: tl.constexpr, TALL: tl.constexpr,
                    WIDE: tl.constexpr):  # fmt: skip
    """The largest magnitudes of SwiGLU's gradient [rows, 2·n]."""
    across = tl.cdiv(n, WIDE)
    most = tl.zeros([TALL], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TALL) * across, tl.num_programs(0)):
        i = (tile // across).to(tl.int64) * TALL + tl.arange(0, TALL)
        j = (tile % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
        of_gate, of_up = _gradient_tile(dy, x, i, j, rows, n)
        left, right = magnitudes(of_gate), magnitudes(of_up)
        along = tl.max(tl.maximum(left, right), 1)
        if LINES:
            tl.atomic_max(first + i, along, i < rows, sem="relaxed")
            tl.atomic_max(most_of_columns + j, tl.max(left, 0), j < n, sem="relaxed")
            tl.atomic_max(most_of_columns + n + j, tl.max(right, 0), j < n, sem="relaxed")
        else:
            most = tl.maximum(most, along)
    if not LINES:
        tl.store(first + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _store_codes(value, row_scale, column_scale, codes, transposed, i, j, inside, rows, width, LINES: tl.constexpr,
                 LARGEST: tl.constexpr):  # fmt: skip
    """A tile's codes by the scales of its rows, and transposed by those of its columns."""
    if LINES:
        code = (value.to(tl.float32) * row_scale).to(codes.dtype.element_ty)
        across = (value.to(tl.float32) * column_scale).to(codes.dtype.element_ty)
    else:
        code = _scaled(value, row_scale, LARGEST).to(codes.dtype.element_ty)
        across = _scaled(value, column_scale, LARGEST).to(codes.dtype.element_ty)
    tl.store(codes + i[:, None] * width + j[None, :], code, inside)
    tl.store(transposed + j[:, None] * rows + i[None, :], tl.trans(across), tl.trans(inside))


@triton.jit
def _encode_gated(dy, x, codes, transposed, inverse, transposed_inverse, first, most_of_columns, rows, n, count,
                  LINES: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, TALL: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Codes of a tile of SwiGLU's gradient [rows, 2·n], as they are and transposed, and the inverses of their
    scales."""
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    if LINES:
        row = _power(tl.load(first + i, i < rows, other=0), LARGEST)
        left = _power(tl.load(most_of_columns + j, j < n, other=0), LARGEST)
        right = _power(tl.load(most_of_columns + n + j, j < n, other=0), LARGEST)
        if tl.program_id(1) == 0:
            tl.store(inverse + i, 1.0 / row, i < rows)
        if tl.program_id(0) == 0:
            tl.store(transposed_inverse + j, 1.0 / left, j < n)
            tl.store(transposed_inverse + n + j, 1.0 / right, j < n)
        row, left, right = row[:, None], left[None, :], right[None, :]
    else:
        part = tl.arange(0, PARTS)
        row = _scale(tl.max(tl.load(first + part, part < count, other=0), 0), LARGEST)
        left = opaque(row)
        right = left
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(inverse, 1.0 / row)
    inside = (i < rows)[:, None] & (j < n)[None, :]
    of_gate, of_up = _gradient_tile(dy, x, i, j, rows, n)
    _store_codes(of_gate, row, left, codes, transposed, i, j, inside, rows, 2 * n, LINES, LARGEST)
    _store_codes(of_up, row, right, codes, transposed, i, n + j, inside, rows, 2 * n, LINES, LARGEST)


def activate(x: Tensor, y: Tensor, peaks: Peaks) -> None:
    """silu(gate) · up of x [rows, 2·n] into ``y`` [rows, n], and the largest magnitudes of that into ``peaks``."""
    (rows, n), lines = y.shape, peaks.columns is not None
    grid = PER_PROCESSOR * processors(x.device) if lines else len(peaks.first)
    _swiglu_peaks[(grid,)](x, y, peaks.first, peaks.columns if lines else peaks.first, rows, n, lines, TALL, WIDE,
                           num_warps=8)  # fmt: skip


def encode_gated(
    given: GatedGradient, dtype: torch.dtype, largest: float, wish: Wish
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of SwiGLU's gradient [m, 2·n] and the inverses of their scales, the same transposed: as
    :func:`ridgeline.nn.kernels.float8.encode_rowwise`, or with one scale (fp32 scalars)."""
    dy, both = given
    (rows, n), lines, device = dy.shape, wish == "lines", dy.device
    peaks = room(rows, 2 * n, wish, device)
    columns = peaks.first if peaks.columns is None else peaks.columns
    programs = PER_PROCESSOR * processors(device) if lines else len(peaks.first)
    _peaks_of_gated[(programs,)](dy, both, peaks.first, columns, rows, n, lines, LOW, WIDE, num_warps=8)
    codes = torch.empty(rows, 2 * n, dtype=dtype, device=device)
    transposed = torch.empty(2 * n, rows, dtype=dtype, device=device)
    inverse, across = (torch.empty((k, 1) if lines else (), device=device) for k in (rows, 2 * n))
    parts = len(peaks.first)
    _encode_gated[(triton.cdiv(rows, TALL), triton.cdiv(n, WIDE))](
        dy, both, codes, transposed, inverse, across, peaks.first, columns, rows, n, parts, lines, largest,
        1 if lines else triton.next_power_of_2(parts), TALL, WIDE, num_warps=8,
    )  # fmt: skip
    return codes, inverse, transposed, across if lines else inverse
