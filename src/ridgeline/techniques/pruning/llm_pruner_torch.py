"""Importance of a model's units: first- and second-order estimates of how much the loss rises without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.structure import Place, PrunedGroup, groups, trainable

Measure = Literal["param_first", "vectorize", "param_second", "param_mix", "l2", "random"]


def saliency(
    model: Transformer, windows: Tensor, measure: Measure, seed: int = 0, report: Callable[[int], None] = lambda n: None
) -> dict[Place, Tensor]:
    """Group → importance of its units [units], by gradients of the mean token loss on ``windows`` [n, seq].

    With w a weight, g its mean gradient and s the mean of its squared gradients over windows (arXiv:2305.11627, section
    3.2), the importance of a unit is the sum over its slices of: ``param_first`` |w g|; ``vectorize`` |Σ w g| of each
    slice; ``param_second`` w² s; ``param_mix`` |w g - w² s / 2|. Baselines: ``l2`` w², ``random``.
    """
    found = groups(model.spec)
    if measure == "random":
        generator = torch.Generator().manual_seed(seed)
        return {place: torch.rand(group.size, generator=generator) for place, group in found.items()}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    if measure == "l2":
        return {place: _sums(group, {n: w * w for n, w in parameters.items()}) for place, group in found.items()}
    first, second = _gradients(model, windows, measure in ("param_second", "param_mix"), report)
    if measure == "param_second":
        worth = {n: w * w * second[n] for n, w in parameters.items()}
    elif measure == "param_mix":
        worth = {n: (w * first[n] - w * w * second[n] / 2).abs_() for n, w in parameters.items()}
    else:
        worth = {n: w * first[n] for n, w in parameters.items()}
        if measure == "param_first":
            worth = {n: w.abs_() for n, w in worth.items()}
    return {place: _sums(group, worth) for place, group in found.items()}


def _gradients(
    model: Transformer, windows: Tensor, squares: bool, report: Callable[[int], None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(mean gradient, mean squared gradient if needed) over windows, which are processed one at a time."""
    parameters = trainable(model)
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()} if squares else {}
    assert model.head is not None
    for i, ids in enumerate(windows):
        report(i)
        hidden = model(ids[None, :-1], return_hidden=True)
        loss = token_loss(hidden, model.head, ids[None, 1:])[0] / (len(ids) - 1)
        for (name, _), g in zip(parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True):
            first[name].add_(g, alpha=1 / len(windows))
            if squares:
                second[name].addcmul_(g, g, value=1 / len(windows))
    model.requires_grad_(False)
    return first, second


def _sums(group: PrunedGroup, worth: Mapping[str, Tensor]) -> Tensor:
    """[units]: over the group's slices, the magnitude of each one's sum."""
    total = torch.zeros(group.size)
    for part in group.parts:
        value = worth[part.parameter]
        each = value.movedim(part.dim, 0).reshape(value.shape[part.dim], -1).sum(1)
        total += each.view(group.size, part.width).sum(1).abs().cpu()
    return total
