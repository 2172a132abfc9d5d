"""Hierarchical search of large vocabularies: exact top-k and sampling in two levels (LightSeq, arXiv:2010.13887, §3.3).

A row of V logits is cut into groups of 128. The k largest lie in the k groups with the largest maxima, so one pass over
the row finds the maxima, and only k groups are searched. Sampling adds up groups, chooses one, and then looks into it:
one uniform number a row, whatever else is in the batch.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128


def _grouped(x: Tensor, fill: float) -> Tensor:
    """``x`` [R, V] as [R, groups, 128], the last group filled up."""
    rows, width = x.shape
    over = -width % GROUP
    if over:
        x = torch.cat([x, x.new_full((rows, over), fill)], 1)
    return x.view(rows, -1, GROUP)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of ``x`` [R, V], largest first: values and indices, [R, k]."""
    if k >= x.shape[1] or k * GROUP >= x.shape[1]:
        return x.topk(min(k, x.shape[1]), dim=1)
    groups = _grouped(x, float("-inf"))
    chosen = groups.amax(2).topk(k, dim=1).indices
    few = groups.gather(1, chosen[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    values, at = few.topk(k, dim=1)
    return values, chosen.gather(1, at // GROUP) * GROUP + at % GROUP


def argmax(x: Tensor) -> Tensor:
    """The index of the largest of each row of ``x`` [R, V], the first of equals: [R]."""
    if x.shape[1] < 2 * GROUP:
        return x.argmax(1)
    groups = _grouped(x, float("-inf"))
    group = groups.amax(2).argmax(1)
    return group * GROUP + groups[torch.arange(len(x), device=x.device), group].argmax(1)


def draw(x: Tensor, uniform: Tensor) -> Tensor:
    """A draw from softmax of each row of ``x`` [R, V] by its number in [0, 1) of ``uniform`` [R]: [R]."""
    weights = _grouped((x - x.amax(1, keepdim=True)).exp_(), 0.0)
    sums = weights.sum(2)
    upto = sums.cumsum(1)
    aim = uniform.to(x.dtype)[:, None] * upto[:, -1:]
    group = _place(upto, aim)
    inside = weights.gather(1, group[:, :, None].expand(-1, -1, GROUP))[:, 0].cumsum(1)
    aim = aim - upto.gather(1, group) + sums.gather(1, group)
    return (group * GROUP + _place(inside, aim))[:, 0]


def _place(upto: Tensor, aim: Tensor) -> Tensor:
    """Where ``aim`` [R, 1] falls among the cumulative sums ``upto`` [R, N]. Rounding may put it at or behind their end:
    the last entry with any weight is then meant. Sums that are no numbers give any place."""
    last = torch.searchsorted(upto, upto[:, -1:].contiguous()).clamp_(max=upto.shape[1] - 1)
    return torch.minimum(torch.searchsorted(upto, aim, right=True), last)
