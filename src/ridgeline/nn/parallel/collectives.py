"""Collectives with autograd support: backward runs the transposed collective.

Activations are plain tensors [B, S, H], whole or this rank's part along a dimension ``dim``: 0, the sequences of the
micro-batch, or 1, the positions of each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.widened import mm
from ridgeline.nn.parallel.dtensor import is_dtensor

# torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local(t: Tensor) -> Tensor:
    """This rank's part of a parameter, divided or not. Differentiable: the gradient is divided in the same way."""
    return t.to_local() if is_dtensor(t) else t


def placed(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of this rank's part of ``like``, divided in the same way."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _first(x: Tensor, dim: int) -> Tensor:
    """Contiguous, with ``dim`` in front: the layout in which parts along it are consecutive."""
    return x.movedim(dim, 0).contiguous()


def gather_parts(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Parts along ``dim`` → the whole tensor, without autograd."""
    part = _first(x, dim)
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    all_gather(whole, part, group=group)
    return whole.movedim(0, dim)


def scatter_parts(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Partial sums of every rank → this rank's part along ``dim`` of their sum, without autograd."""
    whole = _first(x, dim)
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    reduce_scatter(part, whole, group=group)
    return part.movedim(0, dim)


def own_part(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's part along ``dim`` of a tensor that every rank holds."""
    return x.chunk(group.size(), dim)[group.rank()]


class _Copy(torch.autograd.Function):
    """Megatron's f: every rank reads the same; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Megatron's g: partial results are summed; each rank gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone() if x._is_view() or not x.is_contiguous() else x.detach()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Parts → the whole; the gradients of its readers are summed and divided again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gather_parts(x, group, dim).contiguous()  # otherwise each of several readers keeps a copy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_parts(grad, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    """Partial sums → this rank's part of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return scatter_parts(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_parts(grad, ctx.group, ctx.dim), None, None


class _Join(torch.autograd.Function):
    """Parts → the whole, which every rank uses in the same way: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_parts(x, group, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_part(grad, ctx.group).contiguous(), None


class _Cut(torch.autograd.Function):
    """The whole, which every rank holds → this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return own_part(x, group).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_parts(grad, ctx.group, 0), None


def enter(x: Tensor, group: ProcessGroup, dim: int | None) -> Tensor:
    """Before layers that are divided by output: the whole input on every rank.

    ``dim``: it arrives in parts along this dimension. It then carries the part it came from, from which
    :class:`Gathered` rebuilds it. None: every rank has it.
    """
    if dim is None:
        y: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
        return y
    y = _Gather.apply(x, group, dim)  # type: ignore[no-untyped-call]
    y.gathered = (Gathered(group, dim), x.detach())  # type: ignore[attr-defined]
    return y


def leave(x: Tensor, group: ProcessGroup, dim: int | None) -> Tensor:
    """After layers that are divided by input: the sum of the ranks' partial results, whole (None) or divided along
    ``dim``."""
    y: Tensor = _Sum.apply(x, group) if dim is None else _Scatter.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return y


def batch_parts(x: Tensor, group: ProcessGroup, parts: bool, wanted: bool) -> Tensor:
    """A residual stream that every rank has, or of whose sequences each has its ``parts``, in the ``wanted`` form."""
    if parts == wanted:
        return x
    y: Tensor = (_Cut if wanted else _Join).apply(x, group)  # type: ignore[no-untyped-call]
    return y


def rms_norm_of_parts(norm: Any, size: int, group: ProcessGroup, x: Tensor) -> Tensor:
    """RMSNorm ``norm`` over ``size`` elements of which each rank has its part, ``x`` [..., part], and its part of the
    weights: the ranks sum their squares."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    squares = enter(leave(wide.square().sum(-1, keepdim=True), group, None), group, None)
    y: Tensor = wide * (squares / size + norm.eps).rsqrt() * (local(norm.weight) + norm.offset)
    return y.to(x.dtype)


class Gathered:
    """A gathered tensor that several layers read: stored in parts, and gathered once more for their weight gradients.

    It does not hold the part itself: under recomputation that would outlive the forward pass.
    """

    def __init__(self, group: ProcessGroup, dim: int) -> None:
        self.group, self.dim = group, dim
        self.readers = 0
        self.whole: Tensor | None = None

    def again(self, part: Tensor) -> Tensor:
        """The full tensor, in backward; the last reader frees it."""
        if self.whole is None:
            self.whole = gather_parts(part, self.group, self.dim)
            self.left = self.readers
        whole = self.whole
        self.left -= 1
        if not self.left:
            self.whole = None
        return whole


class _GatheredLinear(torch.autograd.Function):
    """x · Wᵀ whose weight gradient reads x from its part (arXiv:2205.05198, section 4.2.2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Tensor, gathered: Gathered) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.gathered = gathered
        return products.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        dx = products.linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        x = ctx.gathered.again(part)
        dw = mm(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
        return dx, dw, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b; an ``x`` that :func:`enter` gathered is not kept for the weight gradient."""
    gathered, part = getattr(x, "gathered", (None, None))
    if gathered is None or part is None or not weight.requires_grad or not torch.is_grad_enabled():
        return products.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        low = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(low), weight.to(low)
    gathered.readers += 1
    y: Tensor = _GatheredLinear.apply(x, weight, part.to(x.dtype), gathered)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)
