"""Dropout as a function of seed and step: the same when a forward pass is recomputed, and off without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.widened import mm
from ridgeline.nn.parallel.collectives import local
from ridgeline.nn.parallel.dtensor import is_dtensor


class Dropout:
    """Zeroes a fraction ``p`` of a layer's input and scales up the rest, with masks of (seed, step, layer, place).

    No random state need be restored where a layer is recomputed, and no mask need be saved. All micro-batches of a step
    on one data rank (``place``) share a layer's mask. Without gradients (evaluation) it does nothing.
    """

    def __init__(self, p: float, seed: int, place: int = 0) -> None:
        self.p, self.seed, self.place = p, seed, place
        self.step: int | None = None

    def at(self, step: int) -> None:
        """Set the current step."""
        self.step = step

    @property
    def on(self) -> bool:
        """Whether it is active: in a training step's forward pass."""
        return self.step is not None and torch.is_grad_enabled()

    @staticmethod
    def seed_of(*parts: int) -> int:
        """One seed derived from several numbers."""
        seed = 0
        for part in parts:
            seed = (seed * 1_000_003 + part + 1) % (2**63 - 25)
        return seed

    def mask(self, like: Tensor, layer: int, whole: int, first: int, step: int) -> Tensor:
        """Factors 0 or 1 / (1 - p), shaped as ``like`` [..., width]: the columns from ``first`` on of ``whole``."""
        seed = self.seed_of(self.seed, step, layer, self.place)
        generator = torch.Generator(like.device).manual_seed(seed)
        drawn = torch.rand(*like.shape[:-1], whole, generator=generator, device=like.device)
        kept = drawn[..., first : first + like.shape[-1]] >= self.p
        return kept.to(like.dtype).div_(1 - self.p)

    def linear(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        """dropout(x) · Wᵀ, [..., in] → [..., out]; ``weight`` [out, in] may be divided, then so is ``x``.

        An ``x`` that arrived in parts of the sequence is kept in parts, as by
        :func:`ridgeline.nn.parallel.collectives.linear`.
        """
        assert self.step is not None
        whole = weight.shape[1]
        first = 0
        if is_dtensor(weight) and x.shape[-1] < whole:
            first = weight.device_mesh.get_local_rank() * x.shape[-1]
        gathered, part = getattr(x, "gathered", (None, None))
        mine = local(weight)
        if torch.is_autocast_enabled(x.device.type):
            low = torch.get_autocast_dtype(x.device.type)
            x, mine = x.to(low), mine.to(low)
        if gathered is not None:
            gathered.readers += 1
            assert part is not None
            part = part.to(x.dtype)
        y: Tensor = _DroppedLinear.apply(x, mine, part, gathered, self, (layer, whole, first, self.step))  # type: ignore[no-untyped-call]
        return y


class _DroppedLinear(torch.autograd.Function):
    """dropout(x) · Wᵀ that saves only x and W: the mask is drawn again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Tensor | None, gathered: Any, drop: Dropout,
                key: tuple[int, int, int, int]) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.gathered, ctx.drop, ctx.key = gathered, drop, key
        return products.linear(x * drop.mask(x, *key), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.gathered is not None:
            x = ctx.gathered.again(x)
        mask = ctx.drop.mask(x, *ctx.key)
        dw = mm(grad.reshape(-1, grad.shape[-1]).t(), (x * mask).reshape(-1, x.shape[-1]))
        dx = products.linear(grad, weight.t()).mul_(mask) if ctx.needs_input_grad[0] else None
        return dx, dw, None, None, None, None
