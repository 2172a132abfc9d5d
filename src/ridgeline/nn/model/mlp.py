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


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) · up, all three [..., width]."""
    if activation == "silu" and torch.is_grad_enabled():
        y: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
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

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, f = spec.hidden_size, spec.intermediate_size
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
