"""Whether and how our kernels make AdaLomo's updates, in place of PyTorch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.dispatch import on_gpu, usable

if TYPE_CHECKING:
    from ridgeline.nn.model.own_kernels import Both


def fits(weight: Tensor, grad: Tensor) -> bool:
    """Whether kernels update a parameter of which this rank has all: on a GPU, in a dtype that they have."""
    if not (on_gpu(weight) and usable(weight, grad) and weight.numel()):
        return False
    from ridgeline.nn.kernels.relative_update import LONGEST

    return (weight.ndim > 1 or weight.numel() <= LONGEST) and _is_right(weight.device)


def _is_right(device: torch.device) -> bool:
    from ridgeline.nn.model import own_kernels

    return own_kernels.is_right("AdaLomo's updates", device, trial)


def by_kernel(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rest: float, tiny: float, lr: float,
              least: float) -> None:  # fmt: skip
    """Update a parameter and its states in place; see :mod:`ridgeline.nn.kernels.relative_update`."""
    from ridgeline.nn.kernels import relative_update as kernel

    if weight.ndim > 1:
        kernel.update_matrix(weight, grad.contiguous(), state["rows"], state["columns"], rest, tiny, lr, least)
    else:
        kernel.update_vector(weight, grad.contiguous(), state["exp_avg_sq"], rest, tiny, lr, least)


def trial(device: torch.device) -> Both:
    """What two steps change of a stack of matrices and of a vector, and their states."""
    from ridgeline.runtime.optimizers import AdaLomoOptimizer

    g = torch.Generator(device).manual_seed(0)
    shapes = [(2, 150, 300), (700,)]
    starts = [torch.randn(shape, generator=g, device=device) for shape in shapes]
    grads = [[torch.randn(shape, generator=g, device=device) for shape in shapes] for _ in range(2)]

    def found(kernel: bool) -> tuple[Tensor, ...]:
        ps = [nn.Parameter(t.clone()) for t in starts]
        optimizer = AdaLomoOptimizer([{"params": ps}], 0.5, 0.8, 1e-3)
        group: dict[str, Any] = optimizer.param_groups[0]
        for step in grads:
            for p, grad in zip(ps, step, strict=True):
                p.grad = grad.clone()
                optimizer.apply(p, group, kernel)
        states = [t for p in ps for name, t in optimizer.state[p].items() if name != "step"]
        return *(p - t for p, t in zip(ps, starts, strict=True)), *states

    return lambda: found(True), lambda: found(False)
