"""Low-rank adapters around frozen linear layers (Hu et al. 2021, arXiv:2106.09685), and DoRA's magnitudes on top of
them (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.adapters.adapter import Adapter, beside, dense
from ridgeline.nn.adapters.dropout import Dropout
from ridgeline.nn.kernels import products
from ridgeline.nn.parallel.collectives import linear, local


class _Rescale(torch.autograd.Function):
    """(y - b + u) ∘ g + b for the base's output y [..., out], the update u, the bias b and g [out].

    Computed as y + u + (g - 1) ∘ v with v = y - b + u, the only tensor saved: with u = 0 and g = 1 it is y bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, u: Tensor, bias: Tensor | None, g: Tensor) -> Tensor:
        out = y + u
        v = out if bias is None else out - bias.to(out.dtype)
        ctx.save_for_backward(v, g)
        return torch.addcmul(out, v, (g - 1).to(out.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, g = ctx.saved_tensors
        dg = (grad * v).flatten(0, -2).sum(0, dtype=g.dtype)
        dy = grad * g.to(grad.dtype)
        return dy, dy, None, dg


class LoRALinear(Adapter):
    """y = base(x) + scale · (x Aᵀ) Bᵀ with A [rank, in] random and B [out, rank] zero at the start.

    With ``dora`` the rows of V = W + scale · B A are rescaled to learned norms m [out], initially those of W's rows.
    The norms of V are treated as constants in the gradient (arXiv:2402.09353, section 4.3).
    """

    leaves: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")
    """With DoRA also ``lora_m``."""

    def __init__(
        self,
        base: Any,
        rank: int,
        scale: float,
        generator: torch.Generator | None = None,
        dropout: Dropout | None = None,
        layer: int = 0,
        dora: bool = False,
    ) -> None:
        super().__init__(base)
        self.scale, self.dropout, self.layer = scale, dropout, layer
        device, dtype = beside(base)
        a = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(a.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))
        self.lora_m = nn.Parameter(self._lengths()) if dora else None

    def _update(self, x: Tensor) -> Tensor:
        # Scale on the low-rank side: elsewhere its gradient would be one more pass and one more tensor.
        if self.dropout is not None and self.dropout.on:
            mid = self.dropout.linear(x, self.lora_a, self.layer)
        else:
            mid = linear(x, local(self.lora_a))
        return products.linear(mid * self.scale, local(self.lora_b))

    def _direction(self) -> Tensor:
        """V = W + scale · B A."""
        return torch.addmm(dense(self.base), local(self.lora_b), local(self.lora_a), alpha=self.scale)

    @torch.no_grad()
    def _lengths(self) -> Tensor:
        with torch.autocast(self.lora_b.device.type, enabled=False):
            lengths: Tensor = torch.linalg.vector_norm(self._direction(), dim=1)
            return lengths

    def _added(self, y: Tensor, update: Tensor) -> Tensor:
        if self.lora_m is None:
            return y + update
        bias = None if self.base.bias is None else local(self.base.bias)
        g = local(self.lora_m) / self._lengths()
        out: Tensor = _Rescale.apply(y, update, bias, g)  # type: ignore[no-untyped-call]
        return out

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output with the update added, and rescaled by DoRA."""
        return self._added(y, self._update(x))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]. The update is computed first: where a layer is recomputed the base's product comes
        last, and is skipped."""
        if self.merged:
            return super().forward(x)
        update = self._update(x)
        return self._added(self.base(x), update)

    def weight(self) -> Tensor:
        """V, with its rows rescaled to the learned norms."""
        v = self._direction()
        return v if self.lora_m is None else v * (local(self.lora_m) / self._lengths())[:, None]

    def state(self) -> dict[str, Tensor]:
        """A, B and, with DoRA, the norms."""
        more = {} if self.lora_m is None else {"lora_m": self.lora_m}
        return super().state() | more


def merged(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A model's state with the updates, times ``scale``, added to the weights under them, rows rescaled by DoRA."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in ("lora_a", "lora_b", "lora_m"):
            continue
        adapted = prefix.removesuffix(".base")
        if f"{adapted}.lora_a" in state:
            name = f"{adapted}.{leaf}"
            if leaf == "weight":
                value = value + scale * (state[f"{adapted}.lora_b"] @ state[f"{adapted}.lora_a"])
                if f"{adapted}.lora_m" in state:
                    value = value * (state[f"{adapted}.lora_m"] / torch.linalg.vector_norm(value, dim=1))[:, None]
        out[name] = value
    return out
