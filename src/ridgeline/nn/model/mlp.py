"""The feed-forward layer, gated (SwiGLU and kin) or plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.spec.model import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


_LIMIT, _SLOPE = 7.0, 1.702


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up (arXiv:2002.05202). Saves only gate and up; autograd's own chain would also save silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(dy)
        d_gate = dy * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)  # elementwise, so in place is safe
        return d_gate, d_up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=_LIMIT)
    if torch.compiler.is_compiling():
        return gate * torch.sigmoid(gate * _SLOPE) * (up.clamp(-_LIMIT, _LIMIT) + 1)
    return torch.sigmoid(gate * _SLOPE).mul_(gate).mul_(up.clamp(-_LIMIT, _LIMIT) + 1)


class _ClampedSwiGLU(torch.autograd.Function):
    """gpt-oss's activation; saves only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _clamped(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        g, u = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        s = torch.sigmoid(g * _SLOPE)
        d_up = (dy * g * s).masked_fill_(up.abs() > _LIMIT, 0)
        d_gate = dy * (u + 1) * (s + _SLOPE * g * s * (1 - s))
        return d_gate.masked_fill_(gate > _LIMIT, 0), d_up


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) · up, all three [..., width]; gpt-oss's clamped one is x · sigmoid(1.702 x) · (up + 1)
    (arXiv:2508.10925)."""
    # A compiler derives the backward pass and chooses what to save. PyTorch 2.11's gives no gradients to a function
    # that returns what it wrote in place (pytorch/pytorch#180642).
    ours = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if activation == "swigluoai" and not ours:
        return _clamped(gate, up)
    if activation in ("silu", "swigluoai") and ours:
        function = _SwiGLU if activation == "silu" else _ClampedSwiGLU
        y: Tensor = function.apply(gate, up)  # type: ignore[no-untyped-call]
        return y
    acted = ACTIVATIONS[activation](gate)
    return acted * up if torch.is_grad_enabled() else acted.mul_(up)


def expand(mlp: MLP, x: Tensor) -> Tensor:
    """The last projection's input, [..., inner], from ``x`` [..., hidden]."""
    if mlp.gate_proj is None:
        return ACTIVATIONS[mlp.activation](mlp.up_proj(x))
    return gated(mlp.activation, mlp.gate_proj(x), mlp.up_proj(x))


class MLP(nn.Module):
    """Dense feed-forward layer."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        """``width``: of what the activation is applied to."""
        super().__init__()
        h, f = spec.hidden_size, width
        self.activation = spec.activation
        self.gate_proj = nn.Linear(h, f, bias=spec.mlp_bias) if spec.gated else None
        self.up_proj = nn.Linear(h, f, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(f, h, bias=spec.mlp_bias)
        self.expand = expand
        """Everything up to the activation; a technique may replace it by a fused function."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., hidden] → [..., hidden]."""
        out: Tensor = self.down_proj(self.expand(self, x))
        return out
