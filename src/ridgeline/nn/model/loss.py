"""The training loss from hidden states, with as little logits memory as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

IGNORE = -100
"""Label of a position that has no loss."""


class _CrossEntropy(torch.autograd.Function):
    """Σ (logsumexp(logits) - logits[label]) over labeled rows, whose gradient, softmax - onehot, replaces the logits.

    The forward pass overwrites its input with the gradient, so that one [N, V] tensor exists where log_softmax and its
    backward need four. Autograd's version counters catch a second backward and any later reader of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != IGNORE).unsqueeze(1)
        target = labels.clamp_min(0).unsqueeze(1)
        x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        picked = x.gather(1, target)
        peak = x.amax(1, keepdim=True)
        x = x.sub_(peak).exp_()
        total = x.sum(1, keepdim=True)
        loss = (total.log() + peak - picked).mul_(valid).sum()
        if ctx.needs_input_grad[0]:
            x.mul_(valid / total).scatter_add_(1, target, -valid.to(x.dtype))
            ctx.save_for_backward(x if x is logits else logits.copy_(x))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(scale), None


def _chunk_loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = _CrossEntropy.apply(head(hidden), labels)  # type: ignore[no-untyped-call]
    return loss


def token_loss(
    hidden: Tensor, head: nn.Module, labels: Tensor, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the token losses (float32 scalar, or wider) and the number of labeled tokens (int64 scalar).

    ``hidden`` [B, S, H] is what the head reads; ``labels`` [B, S] holds for every position the token that its logits
    should predict (shifting is the data's business), or -100. Divide the sum by the count over the *whole* batch.

    ``chunk_tokens`` bounds the logits memory to chunk_tokens·V: the head then runs once more per chunk in the backward
    pass (a third more work in the head). None, the fastest where the memory suffices, keeps one [B·S, V] tensor.
    The head is only ever called, never looked into, so it may be sharded, wrapped or quantized.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    count = (labels != IGNORE).sum()
    if chunk_tokens is None or chunk_tokens >= hidden.shape[0]:
        return _chunk_loss(head, hidden, labels), count
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for rows, targets in zip(torch.split(hidden, chunk_tokens), torch.split(labels, chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(_chunk_loss, head, rows, targets, use_reentrant=False)
        else:
            total = total + _chunk_loss(head, rows, targets)
    return total, count
