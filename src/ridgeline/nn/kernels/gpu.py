"""The fused kernels in Triton, for CUDA devices: the same functions over the same arguments as ``cpu.cpp``.

Arithmetic is float32 regardless of the storage dtype. One program processes each row. Norms are in :mod:`gpu_norms`.
Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.early import wait
from ridgeline.nn.kernels.gpu_norms import rl_add_norm, rl_add_norm_backward
from ridgeline.nn.kernels.quick import blocks, power, quick, tile, warps

BLOCK = 1024


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@quick
@triton.jit
def _activation(x, bias, y, n, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr,
                EARLY: tl.constexpr = False):  # fmt: skip
    wait(EARLY)
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
def _rotate(x, cosine, sine, width, d, count, period, sign, HEADS: tl.constexpr, HALF: tl.constexpr,
            EARLY: tl.constexpr = False):  # fmt: skip
    """All heads of one row, [HEADS, HALF] at a time, by angles that are loaded once."""
    wait(EARLY)
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


def rl_activation(wide, x, t, bias, tb, y, rows, n, kind, peaks=None):
    """As ``rl_activation`` of ``cpu.cpp``. ``peaks``: receives those of ``y``; of SwiGLU without a bias."""
    if peaks is not None:
        from ridgeline.nn.kernels import float8_gated

        float8_gated.activate(x, y, peaks)
        return
    size = min(power(n), BLOCK)
    _activation[(rows, blocks(n, size))](x, x if bias is None else bias, y, n, kind == 0, bias is not None, size)


def rl_activation_backward(wide, dy, x, t, bias, tb, dx, db, rows, n, kind):
    """As ``rl_activation_backward`` of ``cpu.cpp``."""
    size = min(power(n), BLOCK)
    _activation_backward[(rows, triton.cdiv(n, size))](
        dy, x, x if bias is None else bias, dx, n, kind == 0, bias is not None, size
    )
    if db is not None:
        db.copy_(dx.view(-1, n).sum(0, dtype=torch.float32))


def rl_softmax(wide, x, t, bias, tb, bias_rows, rows, n, scale, columns=0):
    """As ``rl_softmax`` of ``cpu.cpp``."""
    folded, size = tile(n, columns)
    kernel = _softmax_folded if folded else _softmax
    kernel[(rows,)](x, x if bias is None else bias, bias_rows, n, scale, bias is not None, size, num_warps=warps(size))


def rl_softmax_backward(wide, d, p, t, rows, n, scale, columns=0):
    """As ``rl_softmax_backward`` of ``cpu.cpp``."""
    folded, size = tile(n, columns)
    kernel = _softmax_backward_folded if folded else _softmax_backward
    kernel[(rows,)](d, p, n, scale, size, num_warps=warps(size))


def rl_rotate(wide, x, t, cosine, sine, tt, rows, width, count, d, period, sign):
    """As ``rl_rotate`` of ``cpu.cpp``."""
    half = power(d // 2)
    heads = min(power(count), max(1, 2048 // half))
    _rotate[(rows,)](x, cosine, sine, width, d, count, period, sign, heads, half)


def rl_gather_heads(out, parts, rope, turned, peaks=None):
    """See :func:`~ridgeline.nn.kernels.gather_heads.gather_heads`; not of a CPU."""
    from ridgeline.nn.kernels.gather_heads import gather_heads

    gather_heads(out, parts, rope, turned, peaks)


def rl_cross_entropy(wide, x, t, labels, rows, n, gradient):
    """As ``rl_cross_entropy`` of ``cpu.cpp``; returns a tensor, so that the host does not wait."""
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    _cross_entropy[(rows,)](x, labels, losses, n, bool(gradient), min(power(n), 4 * BLOCK))
    return losses.sum()


def rl_adamw(low, tl_, master, grad, m, v, n, *numbers):
    """As ``rl_adamw`` of ``cpu.cpp``."""
    _adamw[(triton.cdiv(n, BLOCK),)](
        master if low is None else low, master, grad, m, v, n, *numbers, low is not None, BLOCK
    )


KERNELS = {f.__name__: f for f in (
    rl_add_norm, rl_add_norm_backward, rl_activation, rl_activation_backward, rl_softmax, rl_softmax_backward,
    rl_rotate, rl_gather_heads, rl_cross_entropy, rl_adamw,
)}  # fmt: skip


def call(name: str, *args: Any, **more: Any) -> Tensor | None:
    """Call a kernel by the name and with the arguments of its C++ counterpart; ``more``: what only kernels here do."""
    out: Tensor | None = KERNELS[name](*args, **more)
    return out
