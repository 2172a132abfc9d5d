"""Gradients of a step: their norm over all ranks, however they are divided, and their clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ridgeline.nn.parallel.collectives import local


def holders(p: Tensor, ranks: int) -> int:
    """How many of ``ranks`` ranks hold the same part of a parameter."""
    parts = 1
    if isinstance(p, DTensor):
        for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
            parts *= 1 if isinstance(placement, (Replicate, Partial)) else size
    return ranks // parts


@torch.no_grad()
def sum_partial(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the partial gradients of replicated parameters over ``group``, in one collective.

    Anything nonlinear in the gradient (a norm, a sign, a quantizer) must come after this.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


@torch.no_grad()
def global_norm(parameters: list[nn.Parameter], copies: dict[nn.Parameter, int], world: int) -> Tensor:
    """2-norm of all gradients of the model (fp32 scalar, the same on every rank), in one collective of 8 bytes.

    ``copies``: number of ranks that hold the same part of each parameter; each is weighted by its inverse.
    """
    groups: dict[int, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(copies.get(p, 1), []).append(local(p.grad))
    device = next((g.device for gs in groups.values() for g in gs), torch.device("cpu"))
    return combined_norm({n: list(torch._foreach_norm(grads)) for n, grads in groups.items()}, device, world)


@torch.no_grad()
def combined_norm(groups: dict[int, list[Tensor]], device: torch.device, world: int) -> Tensor:
    """Norm over all ranks (fp32 scalar) from the 2-norms of this rank's parts, keyed by how many ranks hold the same
    ones; one collective of 8 bytes."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for n, norms in groups.items():
        alike = len({x.dtype for x in norms}) == 1
        found = torch.stack(norms).double() if alike else torch.stack([x.double() for x in norms])
        total += found.square().sum() / n
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def clip_factor(norm: Tensor, limit: float, scale: float = 1.0) -> Tensor | None:
    """The factor by which :func:`clip` multiplies gradients; None: no clipping."""
    if not limit:
        return None if scale == 1.0 else torch.ones_like(norm) / scale
    return torch.ones_like(norm) / scale * (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip(parameters: list[nn.Parameter], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Scale the gradients so that their global norm is at most ``limit`` (0: no limit), and undo a loss ``scale``."""
    factor = clip_factor(norm, limit, scale)
    if factor is None:
        return
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device))


@torch.no_grad()
def clear(parameters: list[nn.Parameter], keep: bool) -> None:
    """Drop the gradients, or (``keep``) zero them in place."""
    if keep:
        torch._foreach_zero_([local(p.grad) for p in parameters if p.grad is not None])
        return
    for p in parameters:
        p.grad = None
