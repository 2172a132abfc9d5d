"""What tokens see as spans of keys, and fused attention within them by our kernel for GPUs.

Shapes: B batch, S tokens of a row, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.model.flash_blocks import fits_varlen, has_varlen
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.spec.model import ModelSpec

if TYPE_CHECKING:
    from ridgeline.nn.model.mask import ScoreChanges


def has_kernel(device: torch.device) -> bool:
    """Whether our kernel runs there: where PyTorch's for sequences of different lengths does, if Triton is
    installed."""
    return has_triton() and has_varlen(device)


def by_spans(spec: ModelSpec, x: Tensor) -> bool:
    """Whether layers of a model can attend by our kernel, where ``x`` enters the first of them: in 16 bits, with keys
    as wide as values. With sinks it would matter which key ALiBi's distances are counted from."""
    able = not spec.is_latent and not (spec.attention_sinks and spec.position == "alibi")
    return able and has_kernel(x.device) and fits_varlen(compute_dtype(x), spec.head_dim) and _is_right(spec, x)


def _is_right(spec: ModelSpec, x: Tensor) -> bool:
    if not x.is_cuda:
        return True
    from ridgeline.nn.model.span_trial import is_right

    return is_right(spec, x.device, compute_dtype(x))


def make_spans(
    batch: int, length: int, documents: Tensor | None, causal: bool, window: int, device: torch.device
) -> Tensor:  # fmt: skip
    """Of B rows as one run of tokens [B · S], four numbers of each, int32 [4, B · S]: the oldest and the newest key
    that it sees, and the first and the last query that see it. They do not fall from one token to the next.

    ``documents`` [B, S]: a token sees only those of the same number, which are a run. ``window``: newest tokens that a
    token sees, 0: all, negative: those of its chunk of -window, counted from where its document begins.
    """
    _leave_out()
    at = torch.arange(batch * length, dtype=torch.int32, device=device)
    if documents is None:
        begin = at - at % length
        end = begin + (length - 1)
    else:
        last = torch.ones(batch, length, dtype=torch.bool, device=device)
        torch.ne(documents[:, 1:], documents[:, :-1], out=last[:, :-1])
        last = last.flatten()
        begin = (at * last.roll(1)).cummax(0).values  # the last token's document ends, too
        end = at.masked_fill(~last, batch * length).flip(0).cummin(0).values.flip(0)
    oldest, last_query = begin, end
    if window < 0:
        begin = oldest = at - (at - begin) % -window
        end = last_query = torch.minimum(begin - window - 1, end)
    elif window > 0:
        oldest, last_query = torch.maximum(begin, at - (window - 1)), torch.minimum(end, at + (window - 1))
    return torch.stack((oldest, at if causal else end, at if causal else begin, last_query)).int()


@lru_cache(maxsize=8)
def _of_two(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """ALiBi's slopes of exponents of 2."""
    from ridgeline.nn.kernels.flash import LOG2E

    return torch.tensor(slopes, dtype=torch.float32, device=device) * LOG2E


class _Attention(torch.autograd.Function):
    """Attention of flattened rows within spans."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spans: Tensor, soft_cap: float | None,
        slopes: Tensor | None,
    ) -> Tensor:  # fmt: skip
        from ridgeline.nn.kernels import flash

        out, lse = flash.forward(q, k, v, spans, soft_cap, slopes, None if sinks is None else sinks.float())
        ctx.save_for_backward(q, k, v, sinks, spans, out, lse)
        ctx.soft_cap, ctx.slopes = soft_cap, slopes  # which are kept in any case
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.nn.kernels import flash

        q, k, v, sinks, spans, out, lse = ctx.saved_tensors
        grad = grad if grad.stride(2) == 1 else grad.contiguous()
        dq, dk, dv, delta = flash.backward(grad, q, k, v, out, lse, spans, ctx.soft_cap, ctx.slopes)
        d_sinks = None
        if sinks is not None:
            share = (sinks.float()[:, None] * flash.LOG2E - lse).exp2()
            d_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None, None


def _apply(*given: Any) -> Tensor:
    out: Tensor = _Attention.apply(*given)  # type: ignore[no-untyped-call]
    return out


_attend: Callable[..., Tensor] = _apply


def _leave_out() -> None:
    """Have a compiler leave the kernel out of what it compiles. Not at import, which would import the compiler."""
    global _attend
    if _attend is _apply:
        _attend = torch.compiler.disable(_apply)


def span_attention(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, changes: ScoreChanges | None) -> Tensor:
    """Fused attention of ``q`` [B, H, S, D] to the keys within the ``spans`` of :func:`make_spans`: [B, H, S, D]. Only
    where :func:`by_spans` says so. A compiler leaves the kernel out of what it compiles."""
    batch, _, length, _ = q.shape
    if spans.shape[1] != batch * length:  # of a layer that ranks divide by rows, none of which have documents then
        begin = torch.arange(0, batch * length, length, dtype=torch.int32, device=q.device)
        spans = spans[:, :length].repeat(1, batch) + begin.repeat_interleave(length)
    cap, slopes, sinks = (None, None, None) if changes is None else changes
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]  # which they are in memory
    steep = None if slopes is None else _of_two(slopes, q.device)
    out: Tensor = _attend(*flat, sinks, spans, cap, steep).unflatten(0, (batch, length)).transpose(1, 2)
    return out
