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
from ridgeline.nn.kernels.early import wait
from ridgeline.nn.kernels.gpu_norms import magnitudes
from ridgeline.nn.kernels.peaks import Peaks, room
from ridgeline.nn.kernels.quick import COMPILED, quick

BLOCK = 4096
TALL, WIDE = 128, 64
"""Rows and columns of a tile that is transposed: 128 bytes of a row of 16-bit numbers, 128 codes of a column."""
ALIGNED = 4
"""Numbers between the scale and its inverse: cuBLASLt reads float8 scales at addresses that are multiples of 16."""


@quick
@triton.jit
def _peaks(x, peaks, n, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """The largest magnitude of each program's part, as the bits of a float, in whose order NaN is above infinity."""
    wait(EARLY)
    most = tl.zeros([BLOCK], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(x + at, at < n, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(peaks + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _scale(bits, LARGEST: tl.constexpr):
    """What brings a magnitude, given as bits, to ``LARGEST``."""
    peak = bits.to(tl.float32, bitcast=True)
    scale = tl.minimum(LARGEST / tl.where(bits > 0, peak, 1.0), 1152921504606846976.0)  # 2^60
    scale = tl.where(bits > 0, scale, 1.0)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def _power(bits, LARGEST: tl.constexpr):
    """The same rounded down to a power of two: what differs between the two numbers' bits has the logarithm of their
    ratio, rounded down, where numbers have their exponents. By it no magnitude exceeds ``LARGEST``."""
    most = tl.full([], LARGEST, tl.float32).to(tl.int32, bitcast=True)
    scale = ((tl.minimum(most - bits, 60 << 23) + (127 << 23)) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits > 0, scale, 1.0)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def opaque(scale):
    """``scale``, to the compiler another number, so that codes made with it share no register with those made before:
    of codes that are stored as words and moved as bytes too, ptxas 12.8 lost every other one."""
    if not COMPILED:
        return scale
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [scale], tl.float32, False, 1)


@triton.jit
def _scaled(value, scale, LARGEST: tl.constexpr):
    """Values to be rounded to codes."""
    return tl.minimum(tl.maximum(value.to(tl.float32) * scale, -LARGEST), LARGEST)


@quick
@triton.jit
def _encode(x, peaks, codes, scales, n, count, LARGEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
            ALIGNED: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """``codes`` of x, and ``scales``: what values were multiplied by, and its inverse."""
    wait(EARLY)
    part = tl.arange(0, PARTS)
    scale = _scale(tl.max(tl.load(peaks + part, part < count, other=0), 0), LARGEST)
    if tl.program_id(0) == 0:
        tl.store(scales, scale)
        tl.store(scales + ALIGNED, 1.0 / scale)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(tl.load(x + at, at < n, other=0.0), scale, LARGEST)
    tl.store(codes + at, value.to(codes.dtype.element_ty), at < n)


@triton.jit
def _encode_transposed(x, peaks, codes, transposed, scales, rows, columns, count, LARGEST: tl.constexpr,
                       PARTS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """The same of a tile of x [rows, columns], also transposed: ``transposed`` [columns, rows]."""
    part = tl.arange(0, PARTS)
    scale = _scale(tl.max(tl.load(peaks + part, part < count, other=0), 0), LARGEST)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scales, scale)
        tl.store(scales + ALIGNED, 1.0 / scale)
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    at, inside = i[:, None] * columns + j[None, :], (i < rows)[:, None] & (j < columns)[None, :]
    value = tl.load(x + at, inside, other=0.0)
    tl.store(codes + at, _scaled(value, scale, LARGEST).to(codes.dtype.element_ty), inside)
    code = _scaled(value, opaque(scale), LARGEST).to(codes.dtype.element_ty)
    there = (j < columns)[:, None] & (i < rows)[None, :]
    tl.store(transposed + j[:, None] * rows + i[None, :], tl.trans(code), there)


@quick
@triton.jit
def _encode_rows(x, codes, inverse, rows, columns, LARGEST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
                 EARLY: tl.constexpr = False):  # fmt: skip
    """``codes`` of TALL rows, each with a scale of its own, and ``inverse`` [rows], the scales' inverses."""
    wait(EARLY)
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    most = tl.zeros([TALL], tl.int32)
    for start in range(0, columns, WIDE):
        j = start + tl.arange(0, WIDE)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        bits = magnitudes(tl.load(x + i[:, None] * columns + j[None, :], inside, other=0.0))
        most = tl.maximum(most, tl.max(bits, 1))
    scale = _power(most, LARGEST)
    tl.store(inverse + i, 1.0 / scale, i < rows)
    for start in range(0, columns, WIDE):
        j = start + tl.arange(0, WIDE)
        at, inside = i[:, None] * columns + j[None, :], (i < rows)[:, None] & (j < columns)[None, :]
        code = tl.load(x + at, inside, other=0.0).to(tl.float32) * scale[:, None]
        tl.store(codes + at, code.to(codes.dtype.element_ty), inside)


@triton.jit
def _peaks_of_both(x, row_peaks, column_peaks, rows, columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    """The largest magnitude of each row and of each column, as bits, of what tiles find: both start at 0."""
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    bits = magnitudes(tl.load(x + i[:, None] * columns + j[None, :], inside, other=0.0))
    tl.atomic_max(row_peaks + i, tl.max(bits, 1), i < rows, sem="relaxed")
    tl.atomic_max(column_peaks + j, tl.max(bits, 0), j < columns, sem="relaxed")


@triton.jit
def _encode_both(x, codes, transposed, inverse, transposed_inverse, row_peaks, column_peaks, rows, columns,
                 LARGEST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """``codes`` of a tile by the scales of its rows, ``transposed`` [columns, rows] by those of its columns, and the
    scales' inverses [rows] and [columns]."""
    i = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    row_scale = _power(tl.load(row_peaks + i, i < rows, other=0), LARGEST)
    column_scale = _power(tl.load(column_peaks + j, j < columns, other=0), LARGEST)
    if tl.program_id(1) == 0:
        tl.store(inverse + i, 1.0 / row_scale, i < rows)
    if tl.program_id(0) == 0:
        tl.store(transposed_inverse + j, 1.0 / column_scale, j < columns)
    at, inside = i[:, None] * columns + j[None, :], (i < rows)[:, None] & (j < columns)[None, :]
    value = tl.load(x + at, inside, other=0.0)
    tl.store(codes + at, (value.to(tl.float32) * row_scale[:, None]).to(codes.dtype.element_ty), inside)
    code = (value.to(tl.float32) * column_scale[None, :]).to(codes.dtype.element_ty)
    there = (j < columns)[:, None] & (i < rows)[None, :]
    tl.store(transposed + j[:, None] * rows + i[None, :], tl.trans(code), there)


def encode(x: Tensor, dtype: torch.dtype, largest: float, known: Peaks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` in ``dtype``, whose largest value is ``largest``; the scale that brings the largest magnitude of
    ``x`` to that, and its inverse (fp32 scalars). As :func:`ridgeline.nn.quant.codec.quantize`. ``known``: peaks of
    ``x``, of the whole."""
    x = x.contiguous()
    n = x.numel()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(2 * ALIGNED, dtype=torch.float32, device=x.device)
    peaks = _peaks_of(x) if known is None else known.first
    parts = len(peaks)
    _encode[(triton.cdiv(n, BLOCK),)](x, peaks, codes, scales, n, parts, largest, triton.next_power_of_2(parts), BLOCK,
                                      ALIGNED, num_warps=8)  # fmt: skip
    return codes, scales[0], scales[ALIGNED]


def _peaks_of(x: Tensor) -> Tensor:
    """Largest magnitudes of parts of ``x``, as bits."""
    n = x.numel()
    parts = min(triton.cdiv(n, BLOCK), 4 * processors(x.device))
    peaks = torch.empty(parts, dtype=torch.int32, device=x.device)
    _peaks[(parts,)](x, peaks, n, BLOCK)
    return peaks


def encode_transposed(
    x: Tensor, dtype: torch.dtype, largest: float, known: Peaks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` [m, k], the same transposed [k, m], and the inverse of their scale (fp32 scalar). ``known``: peaks
    of ``x``, of the whole."""
    x = x.contiguous()
    rows, columns = x.shape
    codes, transposed = _pair(x, dtype)
    scales = torch.empty(2 * ALIGNED, dtype=torch.float32, device=x.device)
    peaks = _peaks_of(x) if known is None else known.first
    parts = len(peaks)
    grid = (triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE))
    _encode_transposed[grid](x, peaks, codes, transposed, scales, rows, columns, parts, largest,
                             triton.next_power_of_2(parts), TALL, WIDE, ALIGNED, num_warps=8)  # fmt: skip
    return codes, transposed, scales[ALIGNED]


def encode_rowwise(
    x: Tensor, dtype: torch.dtype, largest: float, transpose: bool, known: Peaks | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes of ``x`` [m, k] with a power of two for each row, and the inverses of these scales [m, 1]; with
    ``transpose`` also transposed codes [k, m] with one for each column, and the inverses of those [k, 1], by the peaks
    of rows and columns if these are ``known``."""
    x = x.contiguous()
    rows, columns = x.shape
    inverse = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if not transpose:
        codes = torch.empty(x.shape, dtype=dtype, device=x.device)
        tall = min(16, max(1, triton.next_power_of_2(rows // (2 * processors(x.device)))))
        _encode_rows[(triton.cdiv(rows, tall),)](x, codes, inverse, rows, columns, largest, tall, BLOCK // tall,
                                                 num_warps=8)  # fmt: skip
        return codes, inverse, None, None
    codes, transposed = _pair(x, dtype)
    transposed_inverse = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE))
    peaks = room(rows, columns, "lines", x.device) if known is None else known
    if known is None:
        _peaks_of_both[grid](x, *peaks, rows, columns, TALL, WIDE, num_warps=8)
    _encode_both[grid](x, codes, transposed, inverse, transposed_inverse, *peaks, rows, columns, largest, TALL, WIDE,
                       num_warps=8)  # fmt: skip
    return codes, inverse, transposed, transposed_inverse


def _pair(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))  # type: ignore[return-value]
