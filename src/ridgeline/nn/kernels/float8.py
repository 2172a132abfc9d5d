"""Encoding tensors in float8 in Triton, for CUDA devices that have it (compute capability 8.9 and later): one pass
finds the largest magnitudes, one writes codes and scale, where PyTorch's operators take some twenty. Matrices of
training are written both as they are and transposed, as float8 products read all their operands along rows. Imported
only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors

BLOCK = 4096
TALL, WIDE, PARTS = 128, 64, 64
"""Rows and columns of a tile that is transposed: 128 bytes of a row of 16-bit numbers, 128 codes of a column. Rows of
peaks that are read at once."""


@triton.jit
def _peaks(x, peaks, n, BLOCK: tl.constexpr):
    """The largest magnitude of each program's part, as the bits of a float, in whose order NaN is above infinity."""
    most = tl.zeros([BLOCK], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(x + at, at < n, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(peaks + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _factor(bits, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """What brings magnitudes, given as bits, to ``LARGEST``; with ``POWER`` rounded down to a power of two."""
    peak = bits.to(tl.float32, bitcast=True)
    scale = tl.minimum(LARGEST / tl.where(bits > 0, peak, 1.0), 1152921504606846976.0)  # 2^60
    if POWER:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits > 0, scale, 1.0)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def _low(value, scale, LARGEST: tl.constexpr):
    """Values to be rounded to codes."""
    return tl.minimum(tl.maximum(value.to(tl.float32) * scale, -LARGEST), LARGEST)


@triton.jit
def _magnitudes(value):
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode(x, peaks, codes, scales, n, count, LARGEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``codes`` of x, and ``scales``: what values were multiplied by, and its inverse."""
    part = tl.arange(0, PARTS)
    scale = _factor(tl.max(tl.load(peaks + part, part < count, other=0), 0), LARGEST, False)
    if tl.program_id(0) == 0:
        tl.store(scales, scale)
        tl.store(scales + 1, 1.0 / scale)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _low(tl.load(x + at, at < n, other=0.0), scale, LARGEST)
    tl.store(codes + at, value.to(codes.dtype.element_ty), at < n)


@triton.jit
def _encode_both(x, peaks, codes, turned, scales, rows, columns, count, LARGEST: tl.constexpr, PARTS: tl.constexpr,
                 TALL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The same of a tile of x [rows, columns], also transposed: ``turned`` [columns, rows]."""
    part = tl.arange(0, PARTS)
    scale = _factor(tl.max(tl.load(peaks + part, part < count, other=0), 0), LARGEST, False)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, scale)
        tl.store(scales + 1, 1.0 / scale)
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    at, inside = i[:, None] * columns + j[None, :], (i < rows)[:, None] & (j < columns)[None, :]
    low = _low(tl.load(x + at, inside, other=0.0), scale, LARGEST).to(codes.dtype.element_ty)
    tl.store(codes + at, low, inside)
    tl.store(turned + j[:, None] * rows + i[None, :], tl.trans(low), (j < columns)[:, None] & (i < rows)[None, :])


@triton.jit
def _encode_rows(x, codes, by, peaks, rows, columns, LARGEST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """``codes`` of TALL rows, each with a factor of its own, and ``by`` [rows], the factors' inverses; with ``COLUMNS``
    also the largest magnitude of each column among these rows: ``peaks`` [programs, columns]."""
    block = tl.program_id(0).to(tl.int64)
    i = block * TALL + tl.arange(0, TALL)
    most = tl.zeros([TALL], tl.int32)
    for start in range(0, columns, WIDE):
        j = start + tl.arange(0, WIDE)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        bits = _magnitudes(tl.load(x + i[:, None] * columns + j[None, :], inside, other=0.0))
        most = tl.maximum(most, tl.max(bits, 1))
        if COLUMNS:
            tl.store(peaks + block * columns + j, tl.max(bits, 0), j < columns)
    scale = _factor(most, LARGEST, True)
    tl.store(by + i, 1.0 / scale, i < rows)
    for start in range(0, columns, WIDE):
        j = start + tl.arange(0, WIDE)
        at, inside = i[:, None] * columns + j[None, :], (i < rows)[:, None] & (j < columns)[None, :]
        low = _low(tl.load(x + at, inside, other=0.0), scale[:, None], LARGEST)
        tl.store(codes + at, low.to(codes.dtype.element_ty), inside)


@triton.jit
def _encode_columns(x, turned, by, peaks, rows, columns, count, LARGEST: tl.constexpr, PARTS: tl.constexpr,
                    TALL: tl.constexpr, WIDE: tl.constexpr, TIMES: tl.constexpr):  # fmt: skip
    """``turned`` [columns, rows]: codes of WIDE columns, each with a factor of its own, and ``by`` [columns], the
    factors' inverses, from the ``count`` rows of ``peaks``."""
    j = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    most = tl.zeros([WIDE], tl.int32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (j < columns)[None, :]
        bits = tl.load(peaks + part[:, None].to(tl.int64) * columns + j[None, :], inside, other=0)
        most = tl.maximum(most, tl.max(bits, 0))
    scale = _factor(most, LARGEST, True)
    if tl.program_id(1) == 0:
        tl.store(by + j, 1.0 / scale, j < columns)
    for step in range(TIMES):
        i = (tl.program_id(1).to(tl.int64) * TIMES + step) * TALL + tl.arange(0, TALL)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        low = _low(tl.load(x + i[:, None] * columns + j[None, :], inside, other=0.0), scale[None, :], LARGEST)
        tl.store(turned + j[:, None] * rows + i[None, :], tl.trans(low.to(turned.dtype.element_ty)),
                 (j < columns)[:, None] & (i < rows)[None, :])  # fmt: skip


def encode(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` in ``dtype``, whose largest value is ``largest``; the factor that brings the largest magnitude of
    ``x`` to that, and its inverse (fp32 scalars). As :func:`ridgeline.nn.quant.codec.quantize`."""
    x = x.contiguous()
    n = x.numel()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    peaks = _peaks_of(x)
    parts = len(peaks)
    _encode[(triton.cdiv(n, BLOCK),)](x, peaks, codes, scales, n, parts, largest, triton.next_power_of_2(parts), BLOCK,
                                      num_warps=8)  # fmt: skip
    return codes, scales[0], scales[1]


def _peaks_of(x: Tensor) -> Tensor:
    """Largest magnitudes of parts of ``x``, as bits."""
    n = x.numel()
    parts = min(triton.cdiv(n, BLOCK), 4 * processors(x.device))
    peaks = torch.empty(parts, dtype=torch.int32, device=x.device)
    _peaks[(parts,)](x, peaks, n, BLOCK)
    return peaks


def encode_both(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` [m, k], the same transposed [k, m], and what both are multiplied by (fp32 scalar)."""
    x = x.contiguous()
    rows, columns = x.shape
    codes, turned = _pair(x, dtype)
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    peaks = _peaks_of(x)
    parts = len(peaks)
    grid = (triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE))
    _encode_both[grid](x, peaks, codes, turned, scales, rows, columns, parts, largest, triton.next_power_of_2(parts),
                       TALL, WIDE, num_warps=8)  # fmt: skip
    return codes, turned, scales[1]


def encode_rowwise(
    x: Tensor, dtype: torch.dtype, largest: float, turn: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes of ``x`` [m, k] with a power of two for each row, and what rows are multiplied by [m, 1]; with ``turn``
    also transposed codes [k, m] with one for each column, and what those are multiplied by [k, 1]."""
    x = x.contiguous()
    rows, columns = x.shape
    codes, turned = _pair(x, dtype) if turn else (torch.empty(x.shape, dtype=dtype, device=x.device), None)
    by, turned_by = (torch.empty(n, 1, dtype=torch.float32, device=x.device) for n in (rows, columns))
    tall = min(64, max(8, triton.next_power_of_2(rows // (2 * processors(x.device)))))
    blocks = triton.cdiv(rows, tall)
    peaks = torch.empty((blocks, columns) if turn else (1, 1), dtype=torch.int32, device=x.device)
    _encode_rows[(blocks,)](x, codes, by, peaks, rows, columns, largest, tall, BLOCK // tall, turn)
    if turned is None:
        return codes, by, None, None
    strips = triton.cdiv(columns, WIDE)
    # Each program reads all peaks of its columns, once for all of its rows.
    times = triton.next_power_of_2(min(8, max(1, rows * strips // (TALL * 4 * processors(x.device)))))
    grid = (strips, triton.cdiv(rows, TALL * times))
    _encode_columns[grid](x, turned, turned_by, peaks, rows, columns, blocks, largest, PARTS, TALL, WIDE, times,
                          num_warps=8)  # fmt: skip
    return codes, by, turned, turned_by


def _pair(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))  # type: ignore[return-value]
