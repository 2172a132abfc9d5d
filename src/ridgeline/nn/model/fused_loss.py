"""The loss of a language model in fused kernels: logits become their gradient in place, or exist in chunks only.

Each function falls back to the plain module's computation where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels import functions
from ridgeline.nn.kernels.backends import LossKernel
from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.model.loss import IGNORE, token_loss
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.nn.model.transformer import LMHead, MLMHead


def fused_token_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`~ridgeline.nn.model.loss.token_loss` whose logits become their gradient in one kernel, in place."""
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    logits = head(hidden)
    if type(logits) is not Tensor:
        return token_loss(hidden, head, labels)
    return functions.logits_loss(logits, labels), (labels != IGNORE).sum()


def chunked_token_loss(
    hidden: Tensor, head: nn.Module, labels: Tensor, rows: Callable[[int, int, int], int],
    kernel: LossKernel | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`~ridgeline.nn.model.loss.token_loss` with the head's last product inside the loss, chunk by chunk.

    ``rows`` gives the rows of a chunk from the rows of all, the vocabulary and the width of the hidden states.
    ``kernel``: computes both, in chunks of its own; None: ours.
    """
    out = getattr(head, "out", None)
    if not is_linear(out) or out._forward_hooks or out._forward_pre_hooks or type(out.weight) is not nn.Parameter:
        return token_loss(hidden, head, labels)
    x, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if isinstance(head, MLMHead):
        x = head.norm(head.activation(head.dense(x)))
    elif not isinstance(head, LMHead) or head.soft_cap is not None:
        return token_loss(hidden, head, labels)
    elif head.scaling != 1:
        x = x / head.scaling
    if kernel is not None:
        dtype = compute_dtype(x)
        bias = None if out.bias is None else out.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            loss = kernel(x.to(dtype), out.weight.to(dtype), bias, labels)
        return loss, (labels != IGNORE).sum()
    size = rows(x.shape[0], out.out_features, out.in_features)
    loss = functions.linear_loss(x, out.weight, out.bias, labels, size, compute_dtype(x))
    return loss, (labels != IGNORE).sum()
