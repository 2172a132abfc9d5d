"""What an encoder-decoder has beside a decoder: attention to the encoder's output, and T5's relative positions
(arXiv:1910.10683, section 2.1).

Shapes: B batch, S queries, T keys, H heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.nn.model.attention import BACKENDS, LayerCache, SelfAttention
from ridgeline.nn.model.mask import Mask
from ridgeline.spec.model import ModelSpec


class Source(NamedTuple):
    """What a decoder attends to."""

    states: Tensor | None
    """The encoder's output [B, T, hidden]; None: its keys and values are in the layers' caches."""
    mask: Mask
    """Which of its tokens are real."""


class CrossAttention(SelfAttention):
    """Attention of the decoder's tokens to the encoder's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = spec.hidden_size
        self.head_dim, self.query_scale = spec.head_dim, spec.query_scale
        self.backend = BACKENDS["flash"]
        self.q_proj = nn.Linear(h, spec.q_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(h, spec.kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(h, spec.kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_size, h, bias=spec.out_bias)

    @property
    def entrances(self) -> tuple[str, ...]:
        """Queries; keys and values read the encoder's output."""
        return ("q_proj",)

    def forward(self, x: Tensor, source: Source, cache: LayerCache | None = None) -> Tensor:
        """``x`` [B, S, hidden] → [B, S, hidden]."""
        batch, length, _ = x.shape
        keys, values = self._stored(source, cache)
        q = self._heads(self.q_proj(x))
        q = q if self.query_scale == 1 else q * self.query_scale
        out = self.backend.function(q, keys, values, source.mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def _stored(self, source: Source, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, T, D] of the source, which a cache keeps."""
        if source.states is None:
            assert cache is not None
            assert cache.source is not None
            return cache.source
        found = self._heads(self.k_proj(source.states)), self._heads(self.v_proj(source.states))
        if cache is not None:
            cache.source = found
        return found

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


def buckets(distances: Tensor, count: int, furthest: int, both_ways: bool) -> Tensor:
    """The bucket of each distance (place of the key minus that of the query): half of them for one distance each, the
    others growing logarithmically up to ``furthest``. ``both_ways``: half are for keys behind the query."""
    found = torch.zeros_like(distances)
    if both_ways:
        count //= 2
        found = (distances > 0) * count
        distances = distances.abs()
    else:
        distances = (-distances).clamp_min(0)
    exact = count // 2
    grown = (distances.float() / exact).log() / math.log(furthest / exact) * (count - exact)
    return found + torch.where(distances < exact, distances, exact + grown.long().clamp_max(count - exact - 1))


def relative_bias(table: nn.Module, spec: ModelSpec, both_ways: bool, start: int, length: int, total: int,
                  device: torch.device) -> Tensor:  # fmt: skip
    """What relative positions add to the scores of queries ``start … start + length`` and ``total`` keys: [1, H, S, T].

    The ``table`` is read once for each distance, not for each pair.
    """
    first = start + length - 1
    far = torch.arange(-first, total - start, device=device)
    each: Tensor = table(buckets(far, spec.relative_buckets, spec.relative_distance, both_ways))  # [S + T - 1, H]
    return each.t().unfold(-1, total, 1).flip(1)[None]


def with_bias(mask: Mask, bias: Tensor) -> Mask:
    """``mask`` whose bias, [S, T] or [B, 1, S, T], has ``bias`` [1, H, S, T] added."""
    return mask._replace(bias=bias if mask.bias is None else bias + mask.bias)


def padding_mask(padding: Tensor | None, dtype: torch.dtype) -> Mask:
    """The mask that hides padding; ``padding`` [B, T] bool: True = real token."""
    if padding is None:
        return Mask(None, False)
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
    return Mask(bias.masked_fill_(~padding.bool(), torch.finfo(dtype).min / 2)[:, None, None], False)
