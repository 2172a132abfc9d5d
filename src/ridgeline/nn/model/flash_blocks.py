"""PyTorch's fused attention kernels with the log of the softmax's denominator, from which parts are put together.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def computable(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands of PyTorch's fused attention as they are, or in fp32 where its kernel of 16 bits fails."""
    first = operands[0]
    if first.device.type == "cpu" and first.dtype.itemsize == 2 and _packs_for_amx_alone():
        return tuple(t.float() for t in operands)
    return operands


@cache
def _packs_for_amx_alone() -> bool:
    # oneDNN offers AMX while PyTorch was told to do without AVX-512 (ATEN_CPU_CAPABILITY): the kernel then packs its
    # operands for AMX with instructions that it was not compiled with, and raises.
    return torch.cpu._is_amx_tile_supported() and "AVX512" not in torch.backends.cpu.get_cpu_capability()


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√D + bias)·v [B, H, S, D] in the dtype of q, and its log-sum-exp [B, H, S] in fp32. ``bias``
    [B, 1, S, T] only on CPUs."""
    k, v = (_every_head(t, q.shape[1]) for t in (k, v))
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    dtype = q.dtype
    q, k, v = computable(q, k, v)
    bias = None if bias is None else bias.to(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return out.to(dtype), lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v, from the *whole* output and log-sum-exp of its queries."""
    groups, dtype = k.shape[1], q.dtype
    k, v = (_every_head(t, q.shape[1]) for t in (k, v))
    if q.is_cuda:
        length, total = q.shape[2], k.shape[2]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, length, total, 0.0, causal, state, state
        )
    else:
        grad, q, k, v, out = computable(grad, q, k, v, out)
        bias = None if bias is None else bias.to(q.dtype)
        dq, dk, dv = (
            t.to(dtype)
            for t in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias
            )
        )
    return dq, _each_group(dk, groups), _each_group(dv, groups)


def _every_head(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _each_group(t: Tensor, groups: int) -> Tensor:
    return t if t.shape[1] == groups else t.unflatten(1, (groups, -1)).sum(2)


class _WithSinks(torch.autograd.Function):
    """Attention with one more score in each head's softmax: only its denominator changes, so that backward is that of
    the plain kernel from the new output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        out, lse = block_forward(q, k, v, causal, bias)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = out * (lse - total).exp().unsqueeze(-1).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, bias, out, total)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bias, out, total = ctx.saved_tensors
        dq, dk, dv = block_backward(grad.contiguous(), q, k, v, out, total, ctx.causal, bias)
        share = (sinks.to(total.dtype)[:, None] - total).exp()
        d_sinks = -(share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Fused attention with ``sinks`` [H] (arXiv:2508.10925): [B, H, S, D]. ``bias`` [B or 1, H or 1, S, T] only on
    CPUs."""
    out: Tensor = _WithSinks.apply(q, k, v, sinks, bias, causal)  # type: ignore[no-untyped-call]
    return out
