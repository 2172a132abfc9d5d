"""Whether our kernel for attention within spans, which no GPU of ours has run yet, computes here what the definition
does: tried once in a process, before a model trains by it."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from ridgeline.nn.model.attention import alibi_slopes, naive_attention
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.own_kernels import differs
from ridgeline.nn.model.spans import make_spans, span_attention
from ridgeline.spec.model import ModelSpec

ROWS, LENGTH, WINDOW = 2, 200, 70


def is_right(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether outputs and gradients of a few tokens of the model's heads, soft caps, ALiBi and sinks are right. Says so
    in a warning if they are not; raises :class:`UserError` where the GPU cannot be used after it."""
    changes = spec.attention_soft_cap, spec.position == "alibi", bool(spec.attention_sinks)
    with torch.inference_mode(False):
        return _tried(device, dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, *changes)


@lru_cache(maxsize=64)
def _tried(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int, cap: float | None, alibi: bool,
    sinks: bool,
) -> bool:  # fmt: skip
    g = torch.Generator(device).manual_seed(0)
    sizes = [(ROWS, LENGTH, n, width) for n in (heads, groups, groups, heads)]
    *numbers, gradient = (torch.randn(size, generator=g, device=device).to(dtype) for size in sizes)
    sink = torch.randn(heads, generator=g, device=device) if sinks else None
    changes = ScoreChanges(cap, tuple(alibi_slopes(heads)) if alibi else None, sink)
    at = torch.arange(LENGTH, device=device)
    hidden = (at[None, :] > at[:, None]) | (at[None, :] <= at[:, None] - WINDOW)
    bias = torch.zeros(LENGTH, LENGTH, device=device).masked_fill_(hidden, float("-inf"))

    def found(kind: torch.dtype, spans: Tensor | None) -> Tensor:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            given = [t.to(kind).clone().requires_grad_() for t in numbers]
            q, k, v = (t.transpose(1, 2) for t in given)
            held = changes._replace(sinks=None if sink is None else sink.to(kind))
            if spans is None:
                out = naive_attention(q, k, v, Mask(bias.to(kind), False, changes=held))
            else:
                out = span_attention(q, k, v, spans, held)
            gradients = torch.autograd.grad(out, given, gradient.to(kind).transpose(1, 2))
            return torch.cat([t.flatten().float() for t in (out.detach(), *gradients)])

    why = differs(
        device,
        lambda: found(dtype, make_spans(ROWS, LENGTH, None, True, WINDOW, device)),
        lambda: found(torch.float32, None),
        "leave flash_attention out of the plan",
    )
    if why:
        warnings.warn(f"attention is computed with masks, as our kernel {why}", stacklevel=2)
    return not why
