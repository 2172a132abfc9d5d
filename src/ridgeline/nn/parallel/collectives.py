"""Collectives with autograd support: backward runs the transposed collective.

Activations are plain tensors, this rank's part or whole; S is the sequence dimension, 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

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


def _first(x: Tensor) -> Tensor:
    """[B, S, …] → contiguous [S, B, …], the layout in which parts of the sequence are consecutive."""
    return x.movedim(1, 0).contiguous()


def gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """[B, S/t, H] parts → [B, S, H], without autograd."""
    part = _first(x)
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    all_gather(whole, part, group=group)
    return whole.movedim(0, 1)


def scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums [B, S, H] of every rank → this rank's part [B, S/t, H] of their sum, without autograd."""
    whole = _first(x)
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    reduce_scatter(part, whole, group=group)
    return part.movedim(0, 1)


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
    """Parts of the sequence → all of it; the gradients of its readers are summed and divided again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Partial sums → this rank's part of the sequence of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sequence(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grad, ctx.group), None


def enter(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """Before layers that are divided by output: the whole input on every rank.

    ``sequence``: it arrives in parts. It then carries the part it came from, from which :class:`Gathered` rebuilds it.
    """
    if not sequence:
        y: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
        return y
    y = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    y.gathered = (Gathered(group), x.detach())  # type: ignore[attr-defined]
    return y


def leave(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """After layers that are divided by input: the sum of the ranks' partial results, full or divided along the
    sequence."""
    y: Tensor = (_Scatter if sequence else _Sum).apply(x, group)  # type: ignore[no-untyped-call]
    return y


def rms_norm_of_parts(norm: Any, size: int, group: ProcessGroup, x: Tensor) -> Tensor:
    """RMSNorm ``norm`` over ``size`` elements of which each rank has its part, ``x`` [..., part], and its part of the
    weights: the ranks sum their squares."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    squares = enter(leave(wide.square().sum(-1, keepdim=True), group, False), group, False)
    y: Tensor = wide * (squares / size + norm.eps).rsqrt() * (local(norm.weight) + norm.offset)
    return y.to(x.dtype)


class Gathered:
    """A gathered tensor that several layers read: stored in parts, and gathered once more for their weight gradients.

    It does not hold the part itself: under recomputation that would outlive the forward pass.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.readers = 0
        self.whole: Tensor | None = None

    def again(self, part: Tensor) -> Tensor:
        """The full tensor, in backward; the last reader frees it."""
        if self.whole is None:
            self.whole = gather_sequence(part, self.group)
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
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        x = ctx.gathered.again(part)
        dw = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dx, dw, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b; an ``x`` from :func:`enter` with a divided sequence is not kept for the weight gradient."""
    gathered, part = getattr(x, "gathered", (None, None))
    if gathered is None or part is None or not weight.requires_grad or not torch.is_grad_enabled():
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        low = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(low), weight.to(low)
    gathered.readers += 1
    y: Tensor = _GatheredLinear.apply(x, weight, part.to(x.dtype), gathered)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)
