"""A weight plus a difference behind hard-concrete gates (arXiv:1712.01312), its gradients, and the penalty on open
gates, in Triton: one launch each. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.quick import blocks, quick

SIZE = 1024
"""Numbers of a program, 8 in each of 128 threads."""


@triton.jit
def _gates(gate, noise, low, high):
    """Stretched gates before they are cut off at 0 and 1, and the sigmoid that they are made of."""
    u = tl.minimum(tl.maximum(noise.to(tl.float32), 1e-6), 1.0 - 1e-6)
    s = tl.sigmoid(tl.log(u / (1.0 - u)) + gate.to(tl.float32))
    return s * (high - low) + low, s


@triton.jit
def _cut(stretched):
    """To [0, 1]. NaN stays: a GPU's minimum and maximum leave it out, which would shut its gate for good."""
    return tl.clamp(stretched, 0.0, 1.0, propagate_nan=tl.PropagateNan.ALL)


@quick
@triton.jit
def _gated_weight(weight, diff, gate, noise, out, n, low, high, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    stretched, _ = _gates(tl.load(gate + at, inside, other=0.0), tl.load(noise + at, inside, other=0.5), low, high)
    z = _cut(stretched)
    w = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    w += z * tl.load(diff + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, w.to(out.dtype.element_ty), inside)


@quick
@triton.jit
def _gated_gradients(grad, diff, gate, noise, d_diff, d_gate, n, low, high, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    stretched, s = _gates(tl.load(gate + at, inside, other=0.0), tl.load(noise + at, inside, other=0.5), low, high)
    z = _cut(stretched)
    slope = tl.where((stretched > 0.0) & (stretched < 1.0), s * (1.0 - s) * (high - low), 0.0)
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    d = tl.load(diff + at, inside, other=0.0).to(tl.float32)
    tl.store(d_diff + at, (z * g).to(d_diff.dtype.element_ty), inside)
    tl.store(d_gate + at, (slope * g * d).to(d_gate.dtype.element_ty), inside)


@quick
@triton.jit
def _shut_gates(gate, n, threshold, rate, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    given = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(given - threshold)
    tl.store(gate + at, (given - rate * chance * (1.0 - chance)).to(gate.dtype.element_ty), inside)


def gated_weight(
    weight: Tensor, diff: Tensor, gate: Tensor, noise: Tensor, out: Tensor, ends: tuple[float, float]
) -> None:
    """Write ``weight`` + ``diff`` ∘ z, where z = min(1, max(0, s (high - low) + low)), s = σ(logit(noise) + gate) and
    ``ends`` = (low, high). All have one shape and are contiguous."""
    n = out.numel()
    _gated_weight[(blocks(n, SIZE),)](weight, diff, gate, noise, out, n, *ends, SIZE)


def gated_gradients(
    grad: Tensor, diff: Tensor, gate: Tensor, noise: Tensor, out: tuple[Tensor, Tensor], ends: tuple[float, float]
) -> None:
    """Write the gradients of ``diff`` and ``gate``, from that of the weight that :func:`gated_weight` makes."""
    n = grad.numel()
    _gated_gradients[(blocks(n, SIZE),)](grad, diff, gate, noise, *out, n, *ends, SIZE)


def shut_gates(gate: Tensor, threshold: float, rate: float) -> None:
    """gate ← gate - rate · p (1 - p), where p = σ(gate - threshold), in place; contiguous."""
    n = gate.numel()
    _shut_gates[(blocks(n, SIZE),)](gate, n, threshold, rate, SIZE)
