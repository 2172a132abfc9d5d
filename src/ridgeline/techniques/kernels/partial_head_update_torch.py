"""Attention that is computed a few heads at a time, in blocks of scores (NLP-Fast, doi:10.1109/PACT52795.2021.00013;
online softmax, arXiv:1805.02867).

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.model.attention import Attention, AttentionBackend, LayerCache
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.rotary import Rope, rotate


class PartialHeads(Attention):
    """``whole`` with the same parameters, for inference: queries, scores and context exist for a few heads at a time.

    Keys and values of all heads are computed at once: they go to the cache. A single token takes the whole layer.
    """

    def __init__(self, whole: Attention, heads: int | None) -> None:
        """``heads``: query heads at a time; None: those of one key/value head."""
        nn.Module.__init__(self)
        self.head_dim, self.backend, self.project = whole.head_dim, whole.backend, whole.project
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj
        self.q_norm, self.k_norm, self.query_scale = whole.q_norm, whole.k_norm, whole.query_scale
        self.joint_norm, self.interleaved = False, False
        self.soft_cap, self.slopes, self.sinks = None, None, None
        self.groups = self.k_proj.out_features // self.head_dim
        self.per_group = self.q_proj.out_features // self.k_proj.out_features
        self.heads = heads or self.per_group

    def forward(self, x: Tensor, mask: Mask, rope: Rope | None = None, cache: LayerCache | None = None) -> Tensor:
        """``x`` [B, S, hidden] → [B, S, hidden]."""
        if x.shape[1] == 1:
            return super().forward(x, mask, rope, cache)
        shape = (*x.shape[:2], self.groups, self.head_dim)
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        k = k if self.k_norm is None else self.k_norm(k)
        k = k if rope is None else rotate(k, rope)
        k, v = k.transpose(1, 2), v.transpose(1, 2)

        def attend(x: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
            return self._summed(x, keys, values, mask, rope)

        if cache is None:
            return attend(x, k, v, mask)
        # A cache knows where its keys are: it is given the layer's input in place of queries.
        return cache.attend(replace(self.backend, function=attend), x, k, v, mask)

    def _summed(self, x: Tensor, keys: Tensor, values: Tensor, mask: Mask, rope: Rope | None) -> Tensor:
        """The layer's output [B, S, hidden], from keys and values [B, G, T, D] that may include earlier tokens."""
        batch, length, hidden = x.shape
        wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
        out = torch.zeros(batch * length, hidden, dtype=wide, device=x.device)
        for head in range(0, self.groups * self.per_group, self.heads):
            first, last = head // self.per_group, (head + self.heads) // self.per_group
            at = slice(head * self.head_dim, (head + self.heads) * self.head_dim)
            bias = None if self.q_proj.bias is None else self.q_proj.bias[at]
            q = F.linear(x, self.q_proj.weight[at], bias).view(batch, length, self.heads, self.head_dim)
            q = q if self.q_norm is None else self.q_norm(q)
            q = (q if rope is None else rotate(q, rope)).transpose(1, 2)
            q = q if self.query_scale == 1 else q * self.query_scale
            context = self.backend.function(q, keys[:, first:last], values[:, first:last], mask)
            context = context.transpose(1, 2).reshape(batch * length, -1)
            weight = self.o_proj.weight[:, at].t()
            if out.dtype == context.dtype:
                torch.addmm(out, context, weight, out=out)
            else:
                out += context @ weight
        if self.o_proj.bias is not None:
            out += self.o_proj.bias
        return out.to(x.dtype).view(batch, length, hidden)


def blocked_attention(piece: Callable[[int, int, int], tuple[int, int]]) -> AttentionBackend:
    """Attention whose scores exist for a block of queries and keys at a time; blocks in the future are left out.

    ``piece(B, S, T)``: rows and keys of a block.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        rows, columns = piece(q.shape[0], q.shape[2], k.shape[2])
        out = torch.empty_like(q)
        for first in range(0, q.shape[2], rows):
            stop = min(q.shape[2], first + rows)
            bias = None if mask.bias is None else mask.bias[..., first:stop, :]
            seen = stop if mask.causal else k.shape[2]
            out[:, :, first:stop] = _rows(q[:, :, first:stop], k[:, :, :seen], v[:, :, :seen], bias,
                                          first if mask.causal else None, columns)  # fmt: skip
        return out

    return AttentionBackend("blocked", attend)


def _rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, start: int | None, columns: int) -> Tensor:
    """Attention of ``q`` [B, H, R, D] to all of ``k`` and ``v`` [B, G, T, D], ``columns`` keys at a time.

    ``bias`` [.., R, T]; ``start``: position of the first query under causality, None without.
    """
    batch, heads, rows, width = q.shape
    groups = k.shape[1]
    wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    stacked = (q * width**-0.5).reshape(batch, groups, -1, width)  # heads that share a key head: more rows
    most = total = summed = None
    for first in range(0, k.shape[2], columns):
        keys, values = k[:, :, first : first + columns], v[:, :, first : first + columns]
        scores = torch.matmul(stacked, keys.transpose(-1, -2)).to(wide)
        by_head = scores.view(batch, heads, rows, -1)
        if bias is not None:
            by_head += bias[..., first : first + columns]
        if start is not None and first + columns > start:
            positions = torch.arange(first, first + by_head.shape[-1], device=q.device)
            future = positions > torch.arange(start, start + rows, device=q.device)[:, None]
            by_head.masked_fill_(future, float("-inf"))
        peak = scores.amax(-1, keepdim=True)
        peak = peak if most is None else torch.maximum(peak, most)
        weights = scores.sub_(peak).exp_()
        here = weights.sum(-1, keepdim=True)
        products = torch.matmul(weights.to(v.dtype), values).to(wide)
        if most is None or total is None or summed is None:
            total, summed = here, products
        else:
            shrink = (most - peak).exp_()
            total, summed = total.mul_(shrink).add_(here), summed.mul_(shrink).add_(products)
        most = peak
    assert total is not None
    assert summed is not None
    return summed.div_(total).to(q.dtype).view(batch, heads, rows, width)
