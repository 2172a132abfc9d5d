"""RMSNorm and LayerNorm, and the dtype rule that every module of the model follows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels.peaks import Wish
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.model import ModelSpec


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products on ``x`` run in: autocast's where autocast is on, else that of ``x``."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _RMSNorm(torch.autograd.Function):
    """y = x · r · w with r = (mean(x²) + eps)^-½. Saves only x and r, where the eager composite saves x twice more.

    The offset o is added to w. With p = dy · x:  dw = rᵀ p (summed over tokens),
    dx = dy · (w + o) · r - x · r³ (p · (w + o)) / H.  Both sums are matrix-vector products, which read p once each and
    write nothing large.

    Everything is computed in float32 (float64 for float64 inputs), whatever the dtype of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, offset: float
    ) -> Tensor:
        y, rstd = _normalized(x, weight, eps, out_dtype, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wide = _wide(x)
        dy = dy.to(wide.dtype)
        if weight is None:
            share = (dy * wide).sum(-1, keepdim=True).mul_(rstd.pow(3)).div_(-x.shape[-1])
            return (dy * rstd).addcmul_(wide, share).to(x.dtype), None, None, None, None
        w = weight.to(wide.dtype)
        w = w + ctx.offset if ctx.offset else w
        p = dy * wide
        dw = torch.mv(p.flatten(0, -2).t(), rstd.flatten()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        share = torch.matmul(p, w).unsqueeze_(-1).mul_(rstd.pow(3)).div_(-x.shape[-1])
        dx = torch.mul(dy, w, out=p).mul_(rstd).addcmul_(wide, share)
        return dx.to(x.dtype), dw, None, None, None


def _normalized(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, r)."""
    wide = _wide(x)
    weight = _wide(weight) + offset if weight is not None and offset else weight
    # vector_norm reads x once; square().mean() would write and re-read a tensor of the size of x.
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = wide * rstd
    return (y if weight is None else y.mul_(weight)).to(out_dtype), rstd


def _composite(x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, offset: float) -> Tensor:
    """The same for a compiler, which derives the backward pass and chooses what to save. PyTorch 2.11's gives no
    gradients to a function that returns what it wrote in place (pytorch/pytorch#180642)."""
    weight = None if weight is None else _wide(weight) + offset
    return F.rms_norm(_wide(x), x.shape[-1:], weight, eps).to(out_dtype)


def _wide(x: Tensor) -> Tensor:
    """``x`` in a dtype that is safe to sum in; no copy for float32 and float64."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (arXiv:1910.07467): [..., size] → [..., size].

    Under autocast the result comes in the autocast dtype, so that the linears that read it don't cast it each again.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        """``offset`` is added to the weight, in float32 (Gemma)."""
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(size))
        self.wish: Wish = ""
        """Which peaks those who read the result would know; fused norms find them."""
        self.update_wish: Wish = ""
        """The same of the gradient of what is added to the residual stream before."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., size]; the statistics are float32 even if ``x`` is not."""
        out_dtype = compute_dtype(x)
        weight = local(self.weight)
        if x.is_cuda and x.dtype == weight.dtype and not self.offset:
            # One fused kernel each way on CUDA. On the CPU F.rms_norm is a chain of eager operators: ours is faster.
            return F.rms_norm(x, weight.shape, weight, self.eps).to(out_dtype)
        if torch.compiler.is_compiling():
            return _composite(x, weight, self.eps, out_dtype, self.offset)
        if not torch.is_grad_enabled():  # a decode step's norms take less time than autograd's bookkeeping
            return _normalized(x, weight, self.eps, out_dtype, self.offset)[0]
        y: Tensor = _RMSNorm.apply(x, weight, self.eps, out_dtype, self.offset)  # type: ignore[no-untyped-call]
        return y


class UnweightedRMSNorm(nn.Module):
    """:class:`RMSNorm` without a weight (Llama 4's on queries and keys)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over its last dimension."""
        if torch.compiler.is_compiling():
            return _composite(x, None, self.eps, compute_dtype(x), 0.0)
        if not torch.is_grad_enabled():
            return _normalized(x, None, self.eps, compute_dtype(x), 0.0)[0]
        y: Tensor = _RMSNorm.apply(x, None, self.eps, compute_dtype(x), 0.0)  # type: ignore[no-untyped-call]
        return y


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension: [..., size] → [..., size], in the dtype that :class:`RMSNorm` would give."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., size]."""
        y = F.layer_norm(x, self.normalized_shape, local(self.weight), local(self.bias), self.eps)
        return y.to(compute_dtype(x))


class NoNorm(nn.Module):
    """In the place of a norm that a family does not have: ``x`` in the dtype that a norm's result would have."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself, cast once for all that read it."""
        return x.to(compute_dtype(x))


def make_norm(spec: ModelSpec, size: int) -> nn.Module:
    """The norm that ``spec`` names, over ``size`` elements."""
    if spec.norm == "rmsnorm":
        return RMSNorm(size, spec.norm_eps, spec.norm_offset)
    return LayerNorm(size, eps=spec.norm_eps)
