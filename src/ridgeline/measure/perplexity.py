"""Losses of held-out windows, from which :mod:`ridgeline.measure.stats` makes perplexities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.transformer import Transformer

TOKENS_AT_ONCE = 4096


@torch.inference_mode()
def window_losses(model: Transformer, windows: Tensor, watch: Callable[[int], None] | None = None) -> list[float]:
    """Mean loss (nats per token) of each window [seq + 1] of ``windows``: every token but the first is predicted.

    ``watch`` is called with the number of finished windows.
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
