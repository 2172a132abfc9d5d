"""The fused kernels in Triton, for CUDA devices: the same functions over the same arguments as ``cpu.cpp``.

Arithmetic is float32 regardless of the storage dtype. One program processes each row; where sums are taken over rows
(gradients of norm weights and biases), there are a few programs for each processor, with a partial sum each. Imported
only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.quick import blocks, power, quick

BLOCK = 1024
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
              HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
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


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@quick
@triton.jit
def _activation(x, bias, y, n, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    if GATED:
        g = tl.load(x + row * 2 * n + at, inside, other=0.0).to(tl.float32)
        u = tl.load(x + row * 2 * n + n + at, inside, other=0.0).to(tl.float32)
        out = g * tl.sigmoid(g) * u
    else:
        v = tl.load(x + row * n + at, inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            v += tl.load(bias + at, inside, other=0.0).to(tl.float32)
        out = 0.5 * v * (1.0 + _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    tl.store(y + row * n + at, out.to(y.dtype.element_ty), inside)


@triton.jit
def swiglu_gradients(d, gate, up):
    """Of gate and up, from the gradient ``d`` of silu(gate) · up."""
    sig = tl.sigmoid(gate)
    silu = gate * sig
    return d * up * (sig + silu * (1.0 - sig)), d * silu


@triton.jit
def _activation_backward(dy, x, bias, dx, n, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    d = tl.load(dy + row * n + at, inside, other=0.0).to(tl.float32)
    if GATED:
        g = tl.load(x + row * 2 * n + at, inside, other=0.0).to(tl.float32)
        u = tl.load(x + row * 2 * n + n + at, inside, other=0.0).to(tl.float32)
        of_gate, of_up = swiglu_gradients(d, g, u)
        tl.store(dx + row * 2 * n + at, of_gate.to(dx.dtype.element_ty), inside)
        tl.store(dx + row * 2 * n + n + at, of_up.to(dx.dtype.element_ty), inside)
    else:
        v = tl.load(x + row * n + at, inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            v += tl.load(bias + at, inside, other=0.0).to(tl.float32)
        th = _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))
        slope = 0.5 * (1.0 + th) + 0.5 * v * (1.0 - th * th) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * v * v)
        tl.store(dx + row * n + at, (d * slope).to(dx.dtype.element_ty), inside)


@triton.jit
def _softmax(x, bias, bias_rows, n, scale, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < n
    r = tl.load(x + row * n + at, inside, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        r += tl.load(bias + (row % bias_rows) * n + at, inside, other=0.0).to(tl.float32)
    r = tl.where(inside, r, float("-inf"))
    r = tl.exp(r - tl.max(r, 0))
    tl.store(x + row * n + at, (r / tl.sum(r, 0)).to(x.dtype.element_ty), inside)


@triton.jit
def _softmax_folded(x, bias, bias_rows, n, scale, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    bias += (row % bias_rows) * n
    peak = float("-inf")
    total = 0.0
    for first in range(0, n, SIZE):
        at = first + tl.arange(0, SIZE)
        r = tl.load(x + at, at < n, other=float("-inf")).to(tl.float32) * scale
        if HAS_BIAS:
            r += tl.load(bias + at, at < n, other=0.0).to(tl.float32)
        r = tl.where(at < n, r, float("-inf"))
        top = tl.maximum(peak, tl.max(r, 0))
        base = tl.where(top == float("-inf"), 0.0, top)  # a tile in which everything is masked
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(r - base), 0)
        peak = top
    for first in range(0, n, SIZE):
        at = first + tl.arange(0, SIZE)
        r = tl.load(x + at, at < n, other=0.0).to(tl.float32) * scale
        if HAS_BIAS:
            r += tl.load(bias + at, at < n, other=0.0).to(tl.float32)
        tl.store(x + at, (tl.exp(r - peak) / total).to(x.dtype.element_ty), at < n)


@triton.jit
def _softmax_backward(d, p, n, scale, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < n
    g = tl.load(d + row * n + at, inside, other=0.0).to(tl.float32)
    q = tl.load(p + row * n + at, inside, other=0.0).to(tl.float32)
    out = scale * q * (g - tl.sum(g * q, 0))
    tl.store(d + row * n + at, out.to(d.dtype.element_ty), inside)


@triton.jit
def _softmax_backward_folded(d, p, n, scale, SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * n
    sums = tl.zeros([SIZE], tl.float32)
    for first in range(0, n, SIZE):
        at = start + first + tl.arange(0, SIZE)
        inside = at < start + n
        g = tl.load(d + at, inside, other=0.0).to(tl.float32)
        sums += g * tl.load(p + at, inside, other=0.0).to(tl.float32)
    along = tl.sum(sums, 0)
    for first in range(0, n, SIZE):
        at = start + first + tl.arange(0, SIZE)
        inside = at < start + n
        g = tl.load(d + at, inside, other=0.0).to(tl.float32)
        out = scale * tl.load(p + at, inside, other=0.0).to(tl.float32) * (g - along)
        tl.store(d + at, out.to(d.dtype.element_ty), inside)


@quick
@triton.jit
def _rotate(x, cosine, sine, width, d, count, period, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    """All heads of one row, [HEADS, HALF] at a time, by angles that are loaded once."""
    row = tl.program_id(0).to(tl.int64)
    at, head = tl.arange(0, HALF), tl.arange(0, HEADS)
    half = d // 2
    inside = at < half
    table = (row % period) * d
    c1 = tl.load(cosine + table + at, inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cosine + table + half + at, inside, other=0.0).to(tl.float32)[None, :]
    s1 = sign * tl.load(sine + table + at, inside, other=0.0).to(tl.float32)[None, :]
    s2 = sign * tl.load(sine + table + half + at, inside, other=0.0).to(tl.float32)[None, :]
    for first in range(0, count, HEADS):
        place = x + row * width + (first + head)[:, None] * d + at[None, :]
        both = (first + head < count)[:, None] & inside[None, :]
        low = tl.load(place, both, other=0.0).to(tl.float32)
        high = tl.load(place + half, both, other=0.0).to(tl.float32)
        tl.store(place, (low * c1 + s1 * high).to(x.dtype.element_ty), both)
        tl.store(place + half, (high * c2 + s2 * low).to(x.dtype.element_ty), both)


@triton.jit
def _cross_entropy(x, labels, losses, n, GRADIENT: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    x += row * n
    valid = label >= 0
    peak = float("-inf")
    total = 0.0
    for start in range(0, n, SIZE):
        at = start + tl.arange(0, SIZE)
        r = tl.load(x + at, at < n, other=float("-inf")).to(tl.float32)
        top = tl.maximum(peak, tl.max(r, 0))
        total = total * tl.exp(peak - top) + tl.sum(tl.exp(r - top), 0)
        peak = top
    picked = tl.load(x + tl.maximum(label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, tl.log(total) + peak - picked, 0.0))
    if GRADIENT:
        for start in range(0, n, SIZE):
            at = start + tl.arange(0, SIZE)
            r = tl.load(x + at, at < n, other=float("-inf")).to(tl.float32)
            g = tl.exp(r - peak) / total - tl.where(at == label, 1.0, 0.0)
            tl.store(x + at, tl.where(valid, g, 0.0).to(x.dtype.element_ty), at < n)


@triton.jit
def _adamw(low, master, grad, m, v, n, keep, beta1_rest, beta2, beta2_rest, eps, step_size, root,
           HAS_LOW: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    g = tl.load(grad + at, inside, other=0.0)
    first = tl.load(m + at, inside, other=0.0)
    first += beta1_rest * (g - first)
    second = tl.load(v + at, inside, other=0.0) * beta2 + beta2_rest * g * g
    w = tl.load(master + at, inside, other=0.0) * keep + step_size * first / (tl.sqrt(second) / root + eps)
    tl.store(master + at, w, inside)
    tl.store(m + at, first, inside)
    tl.store(v + at, second, inside)
    if HAS_LOW:
        tl.store(low + at, w.to(low.dtype.element_ty), inside)


def _size(n: int) -> int:
    return power(n)


def _tile(n: int, columns: int) -> tuple[bool, int]:
    """Whether rows of ``n`` are processed in tiles of ``columns``, and how many tiles a program holds."""
    folded = 0 < columns < n
    return folded, columns if folded else _size(n)


def _warps(size: int) -> int:
    """So many that a thread holds at most 16 numbers of a row."""
    return min(16, max(4, size // 512))


def rl_add_norm(wide, x, tx, add, ta, w, tw, b, total, y, ty, mean, rstd, rows, n, eps, columns=0, peaks=None):
    """As ``rl_add_norm`` of ``cpu.cpp``. ``peaks``: receives those of ``y``; not of rows in tiles."""
    folded, size = _tile(n, columns)
    given = (x, x if add is None else add, w, w if b is None else b, total, y, rstd if mean is None else mean, rstd)
    kinds = add is not None, mean is not None, b is not None
    if peaks is None:
        kernel = _add_norm_folded if folded else _add_norm
        kernel[(rows,)](*given, n, eps, *kinds, size, num_warps=_warps(size))
        return
    lines, warps = peaks.columns is not None, max(8, _warps(size))
    programs = min(rows, RESIDENT // (32 * warps) * processors(x.device)) if lines else len(peaks.first)
    _add_norm_peaks[(programs,)](*given, peaks.first, peaks.columns if lines else peaks.first, rows, n, eps, *kinds,
                                 lines, size, num_warps=warps)  # fmt: skip


def rl_add_norm_backward(wide, dy, ty, dsum, x, tx, w, tw, mean, rstd, dx, dw, db, rows, n, columns=0, low=None,
                         peaks=None):  # fmt: skip
    """As ``rl_add_norm_backward`` of ``cpu.cpp``. ``low``: receives ``dx`` in its dtype; ``peaks``: those of ``low``,
    or of ``dx`` without it; not of rows in tiles."""
    folded, size = _tile(n, columns)
    warps = max(8, _warps(size))
    programs = min(rows, RESIDENT // (32 * warps) * processors(x.device))
    if peaks is not None and peaks.columns is None:
        programs = len(peaks.first)
    parts = torch.empty(1 if db is None else 2, programs, n, dtype=torch.float32, device=x.device)
    given = (dy, x if dsum is None else dsum, x, w, rstd if mean is None else mean, rstd, dx, parts[0], parts[-1])
    kinds = dsum is not None, mean is not None, db is not None
    if folded:
        _add_norm_backward_folded[(programs,)](*given, rows, n, *kinds, size, num_warps=warps)
        if low is not None:
            low.copy_(dx)
    else:
        kind = 0 if peaks is None else 1 if peaks.columns is None else 2
        _add_norm_backward[(programs,)](
            *given, dx if low is None else low, peaks.first if kind else dx, peaks.columns if kind == 2 else dx,
            rows, n, *kinds, low is not None, kind, size, num_warps=warps,
        )  # fmt: skip
    for out, part in zip((dw, db), parts, strict=False):
        if out is not None:
            torch.sum(part, 0, out=out) if out.dtype == part.dtype else out.copy_(part.sum(0))


def rl_activation(wide, x, t, bias, tb, y, rows, n, kind, peaks=None):
    """As ``rl_activation`` of ``cpu.cpp``. ``peaks``: receives those of ``y``; of SwiGLU without a bias."""
    if peaks is not None:
        from ridgeline.nn.kernels import float8_gated

        float8_gated.activate(x, y, peaks)
        return
    size = min(_size(n), BLOCK)
    _activation[(rows, blocks(n, size))](x, x if bias is None else bias, y, n, kind == 0, bias is not None, size)


def rl_activation_backward(wide, dy, x, t, bias, tb, dx, db, rows, n, kind):
    """As ``rl_activation_backward`` of ``cpu.cpp``."""
    size = min(_size(n), BLOCK)
    _activation_backward[(rows, triton.cdiv(n, size))](
        dy, x, x if bias is None else bias, dx, n, kind == 0, bias is not None, size
    )
    if db is not None:
        db.copy_(dx.view(-1, n).sum(0, dtype=torch.float32))


def rl_softmax(wide, x, t, bias, tb, bias_rows, rows, n, scale, columns=0):
    """As ``rl_softmax`` of ``cpu.cpp``."""
    folded, size = _tile(n, columns)
    kernel = _softmax_folded if folded else _softmax
    kernel[(rows,)](x, x if bias is None else bias, bias_rows, n, scale, bias is not None, size, num_warps=_warps(size))


def rl_softmax_backward(wide, d, p, t, rows, n, scale, columns=0):
    """As ``rl_softmax_backward`` of ``cpu.cpp``."""
    folded, size = _tile(n, columns)
    kernel = _softmax_backward_folded if folded else _softmax_backward
    kernel[(rows,)](d, p, n, scale, size, num_warps=_warps(size))


def rl_rotate(wide, x, t, cosine, sine, tt, rows, width, count, d, period, sign):
    """As ``rl_rotate`` of ``cpu.cpp``."""
    half = _size(d // 2)
    heads = min(_size(count), max(1, 2048 // half))
    _rotate[(rows,)](x, cosine, sine, width, d, count, period, sign, heads, half)


def rl_gather_heads(out, parts, rope, turned, peaks=None):
    """See :func:`~ridgeline.nn.kernels.gather_heads.gather_heads`; not of a CPU."""
    from ridgeline.nn.kernels.gather_heads import gather_heads

    gather_heads(out, parts, rope, turned, peaks)


def rl_cross_entropy(wide, x, t, labels, rows, n, gradient):
    """As ``rl_cross_entropy`` of ``cpu.cpp``; returns a tensor, so that the host does not wait."""
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    _cross_entropy[(rows,)](x, labels, losses, n, bool(gradient), min(_size(n), 4 * BLOCK))
    return losses.sum()


def rl_adamw(low, tl_, master, grad, m, v, n, *numbers):
    """As ``rl_adamw`` of ``cpu.cpp``."""
    _adamw[(triton.cdiv(n, BLOCK),)](
        master if low is None else low, master, grad, m, v, n, *numbers, low is not None, BLOCK
    )


def call(name: str, *args: Any, **more: Any) -> Tensor | None:
    """Call a kernel by the name and with the arguments of its C++ counterpart; ``more``: what only kernels here do."""
    out: Tensor | None = globals()[name](*args, **more)
    return out
