"""PyTorch's fused attention kernels with the log of the softmax's denominator, from which parts are put together.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Sequences(NamedTuple):
    """Runs of the tokens of flattened rows [B · S], each of which attends to itself only."""

    ends: Tensor
    """[N + 1] int32: 0, and where each of the N runs ends."""
    longest: int
    """Tokens of the longest run, which the host must know."""
    rows: int = 0
    """How many whole rows they are; 0: documents."""

    @classmethod
    def of_documents(cls, documents: Tensor) -> Sequences:
        """The documents of rows, which are runs of equal numbers in ``documents`` [B, S] on the host: on a GPU it would
        wait for how many there are."""
        numbers = documents.numpy()
        begins = np.ones(numbers.shape, bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        ends = np.append(np.flatnonzero(begins), numbers.size).astype(np.int32)
        return cls(torch.from_numpy(ends), int(np.diff(ends).max(initial=0)))

    @classmethod
    def of_rows(cls, batch: int, length: int, device: torch.device) -> Sequences:
        """Whole rows."""
        return cls(torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device), length, batch)


def has_varlen(device: torch.device) -> bool:
    """Whether PyTorch has a flash kernel for sequences of different lengths and for windows there."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def fits_varlen(dtype: torch.dtype, width: int) -> bool:
    """Whether that kernel computes in ``dtype`` with heads of this ``width``."""
    return dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0


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


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None, sequences: Sequences | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q·kᵀ/√D + bias)·v [B, H, S, D] in the dtype of q, and its log-sum-exp [B, H, S] in fp32. ``bias``
    [B, 1, S, T] only on CPUs; ``sequences`` and the newest tokens that a token sees, ``window`` (0: all), only where
    :func:`has_varlen` says so."""
    if sequences is not None:
        ends, longest, _ = sequences
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _flat(q), _flat(k), _flat(v), ends, ends, longest, longest, 0.0, causal and not window, False,
            **_sides(causal, window),
        )  # fmt: skip
        rows = (q.shape[0], q.shape[2])
        return out.unflatten(0, rows).transpose(1, 2), lse.unflatten(1, rows).transpose(0, 1)
    k, v = (_every_head(t, q.shape[1]) for t in (k, v))
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    dtype = q.dtype
    q, k, v = computable(q, k, v)
    bias = None if bias is None else bias.to(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return out.to(dtype), lse


def _flat(t: Tensor) -> Tensor:
    """[B, H, S, D] as [B · S, H, D], which it is in memory."""
    return t.transpose(1, 2).flatten(0, 1)


def _sides(causal: bool, window: int) -> dict[str, int]:
    """How many keys before and behind its own a query sees; -1: all. As PyTorch's ``varlen_attn`` has it."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if causal else -1}


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None = None,
    sequences: Sequences | None = None, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """This block's share of the gradients of q, k and v, from the *whole* output and log-sum-exp of its queries."""
    if sequences is not None:
        ends, longest, _ = sequences
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
        found = torch.ops.aten._flash_attention_backward(
            _flat(grad), _flat(q), _flat(k), _flat(v), _flat(out), lse.transpose(0, 1).flatten(1), ends, ends,
            longest, longest, 0.0, causal and not window, state, state, **_sides(causal, window),
        )  # fmt: skip
        dq, dk, dv = (t.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2) for t in found)
        return dq, dk, dv
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


class _Flash(torch.autograd.Function):
    """Attention, with one more score in each head's softmax if there are sinks: only its denominator changes, so that
    backward is that of the plain kernel from the new output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, causal: bool,
        ends: Tensor | None, longest: int, window: int,
    ) -> Tensor:  # fmt: skip
        sequences = None if ends is None else Sequences(ends, longest)
        out, lse = block_forward(q, k, v, causal, bias, sequences, window)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (lse - total).exp().unsqueeze(-1).to(out.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, sinks, bias, out, lse, ends)
        ctx.causal, ctx.longest, ctx.window = causal, longest, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bias, out, lse, ends = ctx.saved_tensors
        sequences, d_sinks = None if ends is None else Sequences(ends, ctx.longest), None
        grad = grad.contiguous() if sequences is None else grad
        gradients = block_backward(grad, q, k, v, out, lse, ctx.causal, bias, sequences, ctx.window)
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()
            d_sinks = -(share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *gradients, d_sinks, None, None, None, None, None


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Fused attention with ``sinks`` [H] (arXiv:2508.10925): [B, H, S, D]. ``bias`` [B or 1, H or 1, S, T] only on
    CPUs."""
    out: Tensor = _Flash.apply(q, k, v, sinks, bias, causal, None, 0, 0)  # type: ignore[no-untyped-call]
    return out


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, causal: bool, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Fused attention of ``q`` [B, H, S, D] within each of the ``sequences``, to the newest ``window`` tokens (0: all):
    [B, H, S, V]. Only where :func:`has_varlen` says so."""
    narrow, width = v.shape[-1], q.shape[-1]
    v = F.pad(v, (0, width - narrow)) if narrow < width else v  # the kernel wants values as wide as the keys
    out: Tensor = _Flash.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, None, causal, sequences.ends, sequences.longest, window
    )
    return out[..., :narrow] if narrow < width else out
