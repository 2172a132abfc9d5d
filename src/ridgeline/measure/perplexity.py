"""Perplexity on held-out windows, with an interval, and paired against another model on the same windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.measure.stats import Interval, bootstrap_ci
from ridgeline.nn.loss import token_loss
from ridgeline.nn.transformer import Transformer

TOKENS_AT_ONCE = 4096


@torch.inference_mode()
def window_losses(model: Transformer, windows: Tensor, watch: Callable[[int], None] | None = None) -> list[float]:
    """Mean loss (nats per token) of each window [seq + 1] of ``windows``: every token but the first is predicted.

    ``watch`` hears how many windows are done.
    """
    assert model.head is not None
    device = next(model.parameters()).device
    out: list[float] = []
    for part in torch.split(windows, max(1, TOKENS_AT_ONCE // (windows.shape[1] - 1))):
        ids = part.to(device)
        hidden = model(ids[:, :-1], return_hidden=True)
        for h, labels in zip(hidden, ids[:, 1:], strict=True):
            total, count = token_loss(h[None], model.head, labels[None])
            out.append(float(total) / int(count))
        if watch:
            watch(len(out))
    return out


def perplexity(losses: Sequence[float]) -> Interval:
    """exp of the mean loss over windows, with the 95 % bootstrap interval over windows."""
    mean, low, high = bootstrap_ci([list(losses)], np.mean)
    return Interval(math.exp(mean), math.exp(low), math.exp(high))


def perplexity_ratio(losses: Sequence[float], base: Sequence[float]) -> Interval:
    """Perplexity over that of ``base``, paired window by window: what both find hard cancels.

    Raises ``ValueError`` when they were not taken on the same number of windows.
    """
    if len(losses) != len(base):
        raise ValueError(f"{len(losses)} windows against {len(base)}")
    change = np.asarray(losses) - np.asarray(base)
    draws = np.random.default_rng(0).choice(change, (2000, len(change))).mean(1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return Interval(*(math.exp(float(v)) for v in (change.mean(), low, high)))
