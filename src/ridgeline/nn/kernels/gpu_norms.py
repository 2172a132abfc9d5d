"""RMS norms and LayerNorms of the fused kernels in Triton: forward with a residual addition, one program for
each row; backward with a few programs for each processor, as gradients of weights and biases are sums over rows, with a
partial sum each. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.early import FEW, LINE, prefetch, wait
from ridgeline.nn.kernels.quick import quick, tile, warps

RESIDENT = 1024
"""Threads of a processor, by which sums over rows are divided: a row at a time by fewer leaves the memory waiting."""


@triton.jit
def magnitudes(value):
    """As bits, in whose order NaN is above infinity."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _norm_of_row(row, x, add, w, b, total, y, mean_out, rstd_out, n, eps, HAS_ADD: tl.constexpr, CENTERD: tl.constexpr,
                 HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Writes a row's norm, and returns it as written; zeros beyond its end."""
    at = tl.arange(0, SIZE)
    inside = at < n
    r = tl.load(x + row * n + at, inside, other=0.0).to(tl.float32)
    weight = tl.load(w + at, inside, other=0.0)  # at once with the row: a single row takes as long as its loads
    if HAS_ADD:
        r += tl.load(add + row * n + at, inside, other=0.0).to(tl.float32)
        rounded = r.to(total.dtype.element_ty)
        tl.store(total + row * n + at, rounded, inside)
        r = rounded.to(tl.float32)
    mean = 0.0
    if CENTERD:
        mean = tl.sum(r, 0) / n
        tl.store(mean_out + row, mean)
    centered = tl.where(inside, r - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / n + eps)
    tl.store(rstd_out + row, rstd)
    out = centered * rstd * weight.to(tl.float32)
    if HAS_BIAS:
        out += tl.load(b + at, inside, other=0.0).to(tl.float32)
    rounded = out.to(y.dtype.element_ty)
    tl.store(y + row * n + at, rounded, inside)
    return rounded


@quick
@triton.jit
def _add_norm(x, add, w, b, total, y, mean_out, rstd_out, n, eps, HAS_ADD: tl.constexpr, CENTERD: tl.constexpr,
              HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
    if EARLY and tl.num_programs(0) <= FEW:
        prefetch(w + tl.minimum(tl.arange(0, SIZE // EACH if SIZE > EACH else 1) * EACH, n - 1))
    wait(EARLY)
    _norm_of_row(row, x, add, w, b, total, y, mean_out, rstd_out, n, eps, HAS_ADD, CENTERD, HAS_BIAS, SIZE)


@triton.jit
def _add_norm_peaks(x, add, w, b, total, y, mean_out, rstd_out, first, most_of_columns, rows, n, eps,
                    HAS_ADD: tl.constexpr, CENTERD: tl.constexpr, HAS_BIAS: tl.constexpr, LINES: tl.constexpr,
                    SIZE: tl.constexpr):  # fmt: skip
    """The same of several rows, with the largest magnitudes of what is written (:mod:`~ridgeline.nn.kernels.peaks`)."""
    at = tl.arange(0, SIZE)
    most = tl.zeros([SIZE], tl.int32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        bits = magnitudes(_norm_of_row(row, x, add, w, b, total, y, mean_out, rstd_out, n, eps, HAS_ADD, CENTERD,
                                       HAS_BIAS, SIZE))  # fmt: skip
        most = tl.maximum(most, bits)
        if LINES:
            tl.store(first + row, tl.max(bits, 0))
    if LINES:
        tl.atomic_max(most_of_columns + at, most, at < n, sem="relaxed")
    else:
        tl.store(first + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _add_norm_folded(x, add, w, b, total, y, mean_out, rstd_out, n, eps, HAS_ADD: tl.constexpr, CENTERD: tl.constexpr,
                     HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * n
    sums = tl.zeros([SIZE], tl.float32)
    for first in range(0, n, SIZE):
        at = first + tl.arange(0, SIZE)
        r = tl.load(x + start + at, at < n, other=0.0).to(tl.float32)
        if HAS_ADD:
            r += tl.load(add + start + at, at < n, other=0.0).to(tl.float32)
            rounded = r.to(total.dtype.element_ty)
            tl.store(total + start + at, rounded, at < n)
            r = rounded.to(tl.float32)
        if CENTERD:
            sums += r
        else:
            sums += r * r
    tl.debug_barrier()  # other threads may read what these have written
    mean = 0.0
    if CENTERD:
        mean = tl.sum(sums, 0) / n
        tl.store(mean_out + tl.program_id(0), mean)
        sums = tl.zeros([SIZE], tl.float32)
        for first in range(0, n, SIZE):
            at = first + tl.arange(0, SIZE)
            r = tl.load(total + start + at, at < n, other=0.0).to(tl.float32)
            centered = tl.where(at < n, r - mean, 0.0)
            sums += centered * centered
    rstd = 1.0 / tl.sqrt(tl.sum(sums, 0) / n + eps)
    tl.store(rstd_out + tl.program_id(0), rstd)
    for first in range(0, n, SIZE):
        at = first + tl.arange(0, SIZE)
        r = tl.load(total + start + at, at < n, other=0.0).to(tl.float32)
        out = (r - mean) * rstd * tl.load(w + at, at < n, other=0.0).to(tl.float32)
        if HAS_BIAS:
            out += tl.load(b + at, at < n, other=0.0).to(tl.float32)
        tl.store(y + start + at, out.to(y.dtype.element_ty), at < n)


@triton.jit
def _add_norm_backward(dy, dsum, x, w, mean_in, rstd_in, dx, dw, db, low, peaks, most_of_columns, rows, n,
                       HAS_SUM: tl.constexpr, CENTERD: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOW: tl.constexpr,
                       PEAKS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """``low``: ``dx`` in another dtype. ``PEAKS``: the largest magnitudes of that are found, of the whole (1) or of
    rows and columns (2)."""
    first = tl.program_id(0).to(tl.int64)  # so that offsets do not overflow
    at = tl.arange(0, SIZE)
    inside = at < n
    sum_w = tl.zeros([SIZE], tl.float32)
    if HAS_BIAS:
        sum_b = tl.zeros([SIZE], tl.float32)
    if PEAKS:
        most = tl.zeros([SIZE], tl.int32)
    for i in range(first, rows, tl.num_programs(0)):
        start = i * n
        g = tl.load(dy + start + at, inside, other=0.0).to(tl.float32)
        h = tl.load(x + start + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_in + i)
        mean = 0.0
        if CENTERD:
            mean = tl.load(mean_in + i)
        h = tl.where(inside, (h - mean) * rstd, 0.0)
        sum_w += g * h
        if HAS_BIAS:
            sum_b += g
        g = g * tl.load(w + at, inside, other=0.0).to(tl.float32)  # from a cache: registers are scarce
        c = tl.sum(g * h, 0) / n
        a = 0.0
        if CENTERD:
            a = tl.sum(g, 0) / n
        out = (g - a - h * c) * rstd
        if HAS_SUM:
            out += tl.load(dsum + start + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + start + at, out.to(dx.dtype.element_ty), inside)
        if HAS_LOW:
            tl.store(low + start + at, out.to(dx.dtype.element_ty).to(low.dtype.element_ty), inside)
        if PEAKS:
            bits = magnitudes(out.to(dx.dtype.element_ty).to(low.dtype.element_ty))
            most = tl.maximum(most, bits)
            if PEAKS == 2:
                tl.store(peaks + i, tl.max(bits, 0))
    tl.store(dw + first * n + at, sum_w, inside)
    if HAS_BIAS:
        tl.store(db + first * n + at, sum_b, inside)
    if PEAKS == 2:
        tl.atomic_max(most_of_columns + at, most, inside, sem="relaxed")
    elif PEAKS == 1:
        tl.store(peaks + first, tl.max(most, 0))


@triton.jit
def _add_norm_backward_folded(dy, dsum, x, w, mean_in, rstd_in, dx, dw, db, rows, n, HAS_SUM: tl.constexpr,
                              CENTERD: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    for i in range(program, rows, tl.num_programs(0)):
        start = i * n
        rstd = tl.load(rstd_in + i)
        mean = 0.0
        if CENTERD:
            mean = tl.load(mean_in + i)
        along = tl.zeros([SIZE], tl.float32)
        sums = tl.zeros([SIZE], tl.float32)
        for first in range(0, n, SIZE):
            at = first + tl.arange(0, SIZE)
            g = tl.load(dy + start + at, at < n, other=0.0).to(tl.float32)
            g *= tl.load(w + at, at < n, other=0.0).to(tl.float32)
            h = (tl.load(x + start + at, at < n, other=0.0).to(tl.float32) - mean) * rstd
            along += g * h
            sums += g
        c = tl.sum(along, 0) / n
        a = 0.0
        if CENTERD:
            a = tl.sum(sums, 0) / n
        for first in range(0, n, SIZE):
            at = first + tl.arange(0, SIZE)
            g = tl.load(dy + start + at, at < n, other=0.0).to(tl.float32)
            g *= tl.load(w + at, at < n, other=0.0).to(tl.float32)
            h = (tl.load(x + start + at, at < n, other=0.0).to(tl.float32) - mean) * rstd
            out = (g - a - h * c) * rstd
            if HAS_SUM:
                out += tl.load(dsum + start + at, at < n, other=0.0).to(tl.float32)
            tl.store(dx + start + at, out.to(dx.dtype.element_ty), at < n)
    for first in range(0, n, SIZE):  # the weights' gradients tile by tile, so that their sums stay in registers
        at = first + tl.arange(0, SIZE)
        sum_w = tl.zeros([SIZE], tl.float32)
        if HAS_BIAS:
            sum_b = tl.zeros([SIZE], tl.float32)
        for i in range(program, rows, tl.num_programs(0)):
            mean = 0.0
            if CENTERD:
                mean = tl.load(mean_in + i)
            g = tl.load(dy + i * n + at, at < n, other=0.0).to(tl.float32)
            h = (tl.load(x + i * n + at, at < n, other=0.0).to(tl.float32) - mean) * tl.load(rstd_in + i)
            sum_w += g * h
            if HAS_BIAS:
                sum_b += g
        tl.store(dw + program * n + at, sum_w, at < n)
        if HAS_BIAS:
            tl.store(db + program * n + at, sum_b, at < n)


def rl_add_norm(wide, x, tx, add, ta, w, tw, b, total, y, ty, mean, rstd, rows, n, eps, columns=0, peaks=None):
    """As ``rl_add_norm`` of ``cpu.cpp``. ``peaks``: receives those of ``y``; not of rows in tiles."""
    folded, size = tile(n, columns)
    given = (x, x if add is None else add, w, w if b is None else b, total, y, rstd if mean is None else mean, rstd)
    kinds = add is not None, mean is not None, b is not None
    if peaks is None:
        kernel = _add_norm_folded if folded else _add_norm
        kernel[(rows,)](*given, n, eps, *kinds, size, num_warps=warps(size))
        return
    lines, count = peaks.columns is not None, max(8, warps(size))
    programs = min(rows, RESIDENT // (32 * count) * processors(x.device)) if lines else len(peaks.first)
    _add_norm_peaks[(programs,)](*given, peaks.first, peaks.columns if lines else peaks.first, rows, n, eps, *kinds,
                                 lines, size, num_warps=count)  # fmt: skip


def rl_add_norm_backward(wide, dy, ty, dsum, x, tx, w, tw, mean, rstd, dx, dw, db, rows, n, columns=0, low=None,
                         peaks=None):  # fmt: skip
    """As ``rl_add_norm_backward`` of ``cpu.cpp``. ``low``: receives ``dx`` in its dtype; ``peaks``: those of ``low``,
    or of ``dx`` without it; not of rows in tiles."""
    folded, size = tile(n, columns)
    count = max(8, warps(size))
    programs = min(rows, RESIDENT // (32 * count) * processors(x.device))
    if peaks is not None and peaks.columns is None:
        programs = len(peaks.first)
    parts = torch.empty(1 if db is None else 2, programs, n, dtype=torch.float32, device=x.device)
    given = (dy, x if dsum is None else dsum, x, w, rstd if mean is None else mean, rstd, dx, parts[0], parts[-1])
    kinds = dsum is not None, mean is not None, db is not None
    if folded:
        _add_norm_backward_folded[(programs,)](*given, rows, n, *kinds, size, num_warps=count)
        if low is not None:
            low.copy_(dx)
    else:
        kind = 0 if peaks is None else 1 if peaks.columns is None else 2
        _add_norm_backward[(programs,)](
            *given, dx if low is None else low, peaks.first if kind else dx, peaks.columns if kind == 2 else dx,
            rows, n, *kinds, low is not None, kind, size, num_warps=count,
        )  # fmt: skip
    for out, part in zip((dw, db), parts, strict=False):
        if out is not None:
            torch.sum(part, 0, out=out) if out.dtype == part.dtype else out.copy_(part.sum(0))
