"""Binary masks over the base's weights (Zhao et al. 2020, arXiv:2004.12406)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.adapters.adapter import Adapter, dense
from ridgeline.nn.kernels import products
from ridgeline.nn.parallel.collectives import local


class _MaskedLinear(torch.autograd.Function):
    """x · (W ∘ [s > τ])ᵀ; the gradient of the scores s passes straight through the threshold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scores: Tensor, threshold: float) -> Tensor:
        ctx.threshold = threshold
        ctx.save_for_backward(x, weight, scores)
        return products.linear(x, (weight * (scores > threshold)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scores = ctx.saved_tensors
        dx = grad @ (weight * (scores > ctx.threshold)).to(grad.dtype) if ctx.needs_input_grad[0] else None
        g = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dx, None, g.to(scores.dtype) * weight, None


class MaskLinear(Adapter):
    """A linear layer of weight W ∘ [s > τ] with learned scores s [out, in]; all weights are used at the start."""

    leaves: ClassVar[tuple[str, ...]] = ("adapter_scores",)

    def __init__(self, base: nn.Linear, start: float, threshold: float) -> None:
        super().__init__(base)
        self.threshold = threshold
        self.adapter_scores = nn.Parameter(torch.full_like(base.weight, start))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The output without the contribution of the masked weights."""
        off = local(self.adapter_scores) <= self.threshold
        return y - products.linear(x, (dense(self.base) * off).to(x.dtype)).to(y.dtype)

    def weight(self) -> Tensor:
        """The weight with masked entries at zero."""
        return dense(self.base) * (local(self.adapter_scores) > self.threshold)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in one product."""
        if self.merged:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _MaskedLinear.apply(x, dense(self.base), local(self.adapter_scores), self.threshold)  # type: ignore[no-untyped-call]
        return y if self.base.bias is None else y + local(self.base.bias).to(y.dtype)


def pack(mask: Tensor) -> Tensor:
    """Bools [out, in] → bits, packed eight to a byte, row-major, uint8."""
    flat = F.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of :func:`pack`."""
    flat = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return flat.flatten()[: shape[0] * shape[1]].bool().view(shape)
