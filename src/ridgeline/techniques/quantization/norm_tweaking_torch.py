"""Norm tweaking: train a block's norms to restore its output from before quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ridgeline.runtime.compress_build import BlockJob

HELD_OUT = 4
"""One window in this many is held out, and determines whether the tweaks are kept."""


def of_channels(found: Tensor, wanted: Tensor) -> Tensor:
    """1/C Σ_c |μ_c - μ'_c| + |σ_c - σ'_c|: mean and standard deviation of each channel over all tokens
    (arXiv:2309.02784, equation 2). Both [..., C]; a scalar."""
    a, b = found.reshape(-1, found.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    spread = a.std(0, correction=0) - b.std(0, correction=0)
    return (a.mean(0) - b.mean(0)).abs().mean() + spread.abs().mean()


def of_outputs(found: Tensor, wanted: Tensor) -> Tensor:
    """|Y - Y'|² / |Y'|² over all tokens and channels. Both [..., C]; a scalar."""
    return (found - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30)


Distance = Callable[[Tensor, Tensor], Tensor]
DISTANCES: dict[str, Distance] = {"outputs": of_outputs, "channels": of_channels}


def batches(job: BlockJob, size: int, held_out: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, teacher's outputs) of up to ``size`` windows each: the held-out ones, or all others."""
    assert job.target is not None
    first = 0
    for x, y in zip(job.inputs.chunks(), job.target.chunks(), strict=True):
        number = torch.arange(first, first + len(x))
        first += len(x)
        chosen = (number % HELD_OUT == HELD_OUT - 1) == held_out
        for part in chosen.nonzero().squeeze(1).split(size):
            yield x[part], y[part]


@torch.no_grad()
def held_out_distance(job: BlockJob, distance: Distance, size: int) -> float:
    """The distance on the held-out windows, batch by batch."""
    found = [float(distance(job.forward(x), y)) for x, y in batches(job, size, held_out=True)]
    return sum(found) / len(found)


def tweak(job: BlockJob, distance: Distance, lr: float, passes: int, size: int) -> None:
    """Train norm weights and biases of ``job``'s block with Adam; restore them where that did not help. The outcome is
    recorded in ``job.notes``."""
    chosen = [p for name, p in job.block.named_parameters() if "norm" in name or name.endswith("bias")]
    before = [p.detach().clone() for p in chosen]
    start = held_out_distance(job, distance, size)
    for p in chosen:
        p.requires_grad_(True)
    optimizer = torch.optim.Adam(chosen, lr=lr)
    for _ in range(passes):
        for x, y in batches(job, size, held_out=False):
            loss = distance(job.forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for p in chosen:
        p.requires_grad_(False)
        p.grad = None
    job.settle()
    end = held_out_distance(job, distance, size)
    kept = end < start  # NaN is not kept either
    if not kept:
        with torch.no_grad():
            for p, old in zip(chosen, before, strict=True):
                p.copy_(old)
    job.notes["norm_tweaking"] = {"before": start, "after": end, "kept": kept}
