"""Diff pruning: a sparse difference to the base's weights (Guo et al. 2021, arXiv:2012.07463)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.adapters.adapter import Adapter, dense
from ridgeline.nn.adapters.dropout import Dropout
from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.dispatch import on_gpu, usable
from ridgeline.nn.parallel.collectives import local

if TYPE_CHECKING:
    from ridgeline.nn.model.own_kernels import Both

LOW, HIGH = -0.1, 1.1
"""Ends of the stretched interval of the hard-concrete distribution (Louizos et al. 2018, arXiv:1712.01312)."""
OPEN = 2.0
"""Initial value of the gates: nearly all are open."""


def settled(gate: Tensor) -> Tensor:
    """Deterministic gates in [0, 1]."""
    return (torch.sigmoid(gate) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_chance(gate: Tensor) -> Tensor:
    """Probability that a gate is not zero: the expected L0 norm is their sum."""
    return torch.sigmoid(gate - math.log(-LOW / HIGH))


def shut(gate: Tensor, rate: float) -> None:
    """A step of length ``rate`` against the expected number of open gates, in place."""
    if _by_kernels(gate):
        from ridgeline.nn.kernels.gated_difference import shut_gates

        shut_gates(gate, math.log(-LOW / HIGH), rate)
    else:
        p_open = open_chance(gate)
        gate.sub_(p_open.mul_(1 - p_open), alpha=rate)


def _noise(gate: Tensor, key: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) of ``key``, shaped as ``gate``."""
    generator = torch.Generator(gate.device).manual_seed(Dropout.seed_of(*key))
    return torch.rand(gate.shape, generator=generator, device=gate.device, dtype=gate.dtype)


def _gates(gate: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(gates in [0, 1], their derivative by ``gate``), with a ``noise`` in [0, 1), which is overwritten."""
    s = noise.clamp_(1e-6, 1 - 1e-6).logit_().add_(gate).sigmoid_()
    z = s * (HIGH - LOW) + LOW
    inside = (z > 0) & (z < 1)
    slope = s.mul_(1 - s).mul_(HIGH - LOW).mul_(inside)
    return z.clamp_(0, 1), slope


def _draw(gate: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The same with the noise of ``key``."""
    return _gates(gate, _noise(gate, key))


def _weight(weight: Tensor, diff: Tensor, gate: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """W + d ∘ z in ``dtype``, by a kernel."""
    from ridgeline.nn.kernels.gated_difference import gated_weight

    out = torch.empty_like(weight, dtype=dtype)
    gated_weight(weight, diff, gate, noise, out, (LOW, HIGH))
    return out


def _gradients(grad: Tensor, diff: Tensor, gate: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the difference and of the gates' parameters, from the weight's, by a kernel."""
    from ridgeline.nn.kernels.gated_difference import gated_gradients

    out = torch.empty_like(diff), torch.empty_like(gate)
    gated_gradients(grad.contiguous(), diff, gate, noise, out, (LOW, HIGH))
    return out


def _by_kernels(*tensors: Tensor) -> bool:
    return on_gpu(*tensors) and usable(*tensors) and tensors[0].numel() > 0 and _is_right(tensors[0].device)


def _is_right(device: torch.device) -> bool:
    from ridgeline.nn.model import own_kernels

    return own_kernels.is_right("gated differences of weights", device, trial)


def trial(device: torch.device) -> Both:
    """The weight and both gradients of a small layer, some of whose gates are shut, and gates behind a step."""
    g = torch.Generator(device).manual_seed(0)
    weight, diff, gate, grad = (torch.randn(70, 90, generator=g, device=device) for _ in range(4))
    noise = torch.rand(70, 90, generator=g, device=device)

    def ours() -> tuple[Tensor, ...]:
        from ridgeline.nn.kernels.gated_difference import shut_gates

        later = gate.clone()
        shut_gates(later, math.log(-LOW / HIGH), 0.5)
        both = _gradients(grad, diff, gate, noise)
        return _weight(weight, diff, gate, noise, torch.float32), *both, later - gate

    def right() -> tuple[Tensor, ...]:
        z, slope = _gates(gate, noise.clone())
        p = open_chance(gate)
        return weight + z * diff, z * grad, slope * grad * diff, -0.5 * p * (1 - p)

    return ours, right


class _DiffLinear(torch.autograd.Function):
    """x · (W + d ∘ z)ᵀ that saves x, W, d and the gates' parameters: everything else is recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, diff: Tensor, gate: Tensor, key: tuple[int, ...]) -> Tensor:
        ctx.key = key
        ctx.save_for_backward(x, weight, diff, gate)
        if _by_kernels(weight, diff, gate):
            return products.linear(x, _weight(weight, diff, gate, _noise(gate, key), x.dtype))
        z, _ = _draw(gate, key)
        return products.linear(x, z.mul_(diff).add_(weight).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, diff, gate = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])
        dx: Tensor | None = None
        if _by_kernels(weight, diff, gate):
            noise = _noise(gate, ctx.key)
            if ctx.needs_input_grad[0]:
                dx = grad @ _weight(weight, diff, gate, noise, grad.dtype)
            return dx, None, *_gradients(rows[0] @ rows[1], diff, gate, noise), None
        z, slope = _draw(gate, ctx.key)
        if ctx.needs_input_grad[0]:
            dx = grad @ (diff * z).add_(weight).to(grad.dtype)
        g = (rows[0] @ rows[1]).to(diff.dtype)
        d_diff = z.mul_(g)
        return dx, None, d_diff, slope.mul_(g).mul_(diff), None


class DiffLinear(Adapter):
    """A linear layer of weight W + d ∘ z: the difference d [out, in] starts at zero, its gates z are learned.

    In training the gates are drawn from their hard-concrete distribution by (seed, step, layer); otherwise they are
    deterministic.
    """

    leaves: ClassVar[tuple[str, ...]] = ("adapter_diff", "adapter_gate")

    def __init__(self, base: nn.Linear, noise: Dropout | None = None, layer: int = 0) -> None:
        super().__init__(base)
        self.noise, self.layer = noise, layer
        self.adapter_diff = nn.Parameter(torch.zeros_like(base.weight))
        self.adapter_gate = nn.Parameter(torch.full_like(base.weight, OPEN))

    def _difference(self) -> Tensor:
        return local(self.adapter_diff) * settled(local(self.adapter_gate))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output plus the product with the difference."""
        return y + products.linear(x, self._difference().to(x.dtype)).to(y.dtype)

    def weight(self) -> Tensor:
        """W plus the gated difference."""
        return dense(self.base) + self._difference()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in one product."""
        if self.merged or self.noise is None or not self.noise.on:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        assert self.noise.step is not None
        key = (self.noise.seed, self.noise.step, self.layer, 0)
        y: Tensor = _DiffLinear.apply(x, dense(self.base), local(self.adapter_diff), local(self.adapter_gate), key)  # type: ignore[no-untyped-call]
        return y if self.base.bias is None else y + local(self.base.bias).to(y.dtype)


def projected(differences: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """The largest magnitudes over all differences, a fraction ``density`` of them; the others are set to zero."""
    total = sum(d.numel() for d in differences.values())
    keep = max(1, round(total * density))
    every = torch.cat([d.abs().flatten() for d in differences.values()])
    least = every.kthvalue(total - keep + 1).values
    return {n: torch.where(d.abs() >= least, d, 0.0) if least > 0 else d.clone() for n, d in differences.items()}
