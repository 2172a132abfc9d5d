"""Multi-head and grouped-query attention, and its interchangeable backends.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.nn.kernels.widened import fused_attention, matmul
from ridgeline.nn.model.flash_blocks import Sequences, computable, varlen_attention, with_sinks
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.norm import RMSNorm, UnweightedRMSNorm, compute_dtype
from ridgeline.nn.model.rotary import Rope, rotate
from ridgeline.nn.model.spans import span_attention
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.errors import unknown
from ridgeline.spec.model import CAPPED_ROWS, ModelSpec


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute softmax(q·kᵀ/√D + mask)·v.

    ``function(q [B,H,S,D], k [B,G,T,D], v [B,G,T,D], mask) -> [B,H,S,D]``; H is a multiple of G.
    ``wants_bias``: the function cannot apply causality itself and must always be given it as a bias.
    ``separates``: it masks documents by their numbers, and is given no bias for them.
    ``splits``: it attends within each document, and on a GPU within windows, without a bias for them, and by our kernel
    to what PyTorch's has not.
    """

    name: str
    function: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
    wants_bias: bool = False
    separates: bool = False
    splits: bool = False


class LayerCache:
    """Keys and values of one layer, [B, G, T, D] each, allocated once for all T positions."""

    source: tuple[Tensor, Tensor] | None = None
    """Keys and values of the encoder's output, which a decoder's layer attends to beside them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.length = 0

    @property
    def turns(self) -> bool:
        """Whether :meth:`attend` turns queries and keys by the mask's tables (rotary embedding)."""
        return False

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``k`` and ``v`` [B, G, S, D] to the cache, and return views of everything stored."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        if self.values is not self.keys:
            self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def share(self) -> None:
        """Keep one tensor: values are the keys (latent attention)."""
        self.values = self.keys

    @property
    def fresh(self) -> bool:
        """Whether new tokens attend to each other only."""
        return self.length == 0

    def store(self, x: Tensor) -> Tensor:
        """Append ``x`` [B, G, S, D] to a fresh, shared cache, and return it as stored."""
        return self.append(x, x)[0]

    def attend_own(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attention of new tokens to each other, [B, H, S, V], without a change of what is cached."""
        return backend.function(q, k, v, mask)

    def attend(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Append ``k`` and ``v`` and let ``q`` [B, H, S, D] attend to everything stored: [B, H, S, D]."""
        return backend.function(q, *self.append(k, v), mask)


CacheOf = Callable[[tuple[int, ...], torch.dtype, torch.device], LayerCache]
"""Creates a layer's cache from the shape [B, G, T, D] of its keys, their dtype, and the device."""


def plain_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerCache:
    """An empty cache that stores keys and values unquantized."""
    return LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))


def probabilities(q: Tensor, k: Tensor, mask: Mask, dtype: torch.dtype) -> Tensor:
    """softmax(q·kᵀ/√D + mask), [B, H, S, T] in ``dtype``."""
    batch, heads, length, width = q.shape
    groups, total = k.shape[1], k.shape[2]
    # Query heads that share a key head are stacked as more rows of one product, so keys are never repeated.
    q = (q * width**-0.5).reshape(batch, groups, -1, width)
    scores = matmul(q, k.transpose(-1, -2)).view(batch, heads, length, total)
    changes = mask.changes
    if changes is not None:
        if changes.soft_cap is not None:
            scores = torch.tanh(scores / changes.soft_cap) * changes.soft_cap
        if (slopes := changes.bias(total, scores)) is not None:
            scores = scores + slopes
    if mask.bias is not None:
        scores = scores + mask.bias
    if changes is None or changes.sinks is None:
        return scores.softmax(-1, dtype=_softmax_dtype(scores)).to(dtype)
    sinks = changes.sinks.to(scores.dtype)[:, None, None].expand(batch, -1, length, 1)
    return torch.cat((scores, sinks), -1).softmax(-1, dtype=_softmax_dtype(scores))[..., :-1].to(dtype)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention by its definition: the score matrix [B, H, S, T] is materialized. The baseline for "flash"."""
    batch, heads, length, _ = q.shape
    groups, total, width = v.shape[1:]
    weights = probabilities(q, k, mask, v.dtype)
    return matmul(weights.view(batch, groups, -1, total), v).view(batch, heads, length, width)


def _softmax_dtype(scores: Tensor) -> torch.dtype:
    return torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, grouped: bool = False
) -> Tensor:
    """PyTorch's ``scaled_dot_product_attention`` of what :func:`computable` makes of its operands, in q's dtype."""
    dtype, width = q.dtype, v.shape[-1]
    if width < q.shape[-1]:  # its fused kernels want values as wide as the keys
        v = F.pad(v, (0, q.shape[-1] - width))
        return fused(q, k, v, bias, causal, grouped)[..., :width]
    q, k, v = computable(q, k, v)
    bias = bias.to(q.dtype) if bias is not None and bias.is_floating_point() else bias
    return fused_attention(q, k, v, bias, causal, grouped).to(dtype)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """PyTorch's fused attention (flash or memory-efficient kernels), or ours: no score matrix (arXiv:2205.14135)."""
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    if mask.spans is not None:
        q, k, v = (t.to(compute_dtype(t)) for t in (q, k, v))
        return span_attention(q, k, v, mask.spans, mask.changes)
    if mask.sequences is not None:
        return _within(q, k, v, mask, mask.sequences)
    if mask.changes is not None:
        return _flash_changed(q, k, v, mask, mask.changes)
    if length == 1 and groups < heads and (mask.bias is None or mask.bias.dim() == 2):
        # Decoding: the heads that share a key head become the queries of one head; keys are read once.
        q = q.reshape(batch, groups, heads // groups, width)
        return fused(q, k, v, mask.bias).reshape(batch, heads, 1, width)
    return fused(q, k, v, mask.bias, mask.causal, groups < heads)


def _within(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sequences: Sequences) -> Tensor:
    """Attention within each of the ``sequences``, which takes work as the squares of their lengths and not of the
    row's. Ranks may divide a layer by rows, of which there are then others than where the ``sequences`` were made."""
    if sequences.rows not in (0, q.shape[0]):
        sequences = Sequences.of_rows(q.shape[0], q.shape[2], q.device)
    return (_each if q.device.type == "cpu" else _packed)(q, k, v, mask, sequences)


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sequences: Sequences) -> Tensor:
    """By one kernel, on GPUs."""
    sinks = None if mask.changes is None else mask.changes.sinks
    q, k, v = (t.to(compute_dtype(t)) for t in (q, k, v))
    return varlen_attention(q, k, v, sequences, mask.causal, mask.window, sinks)


def _each(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sequences: Sequences) -> Tensor:
    """By a call for each, on a CPU."""
    batch, heads, length, _ = q.shape
    each, grouped = sequences.ends.diff().tolist(), k.shape[1] < heads
    rows = (t.transpose(1, 2).flatten(0, 1).split(each) for t in (q, k, v))
    found = []
    for part in zip(*rows, strict=True):
        queries, keys, values = (t.transpose(0, 1)[None] for t in part)
        found.append(fused(queries, keys, values, None, mask.causal, grouped)[0].transpose(0, 1))
    return torch.cat(found).view(batch, length, heads, -1).transpose(1, 2)


def _flash_changed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, changes: ScoreChanges) -> Tensor:
    """Fused attention with ALiBi as a bias, and sinks in the softmax's denominator. It has no soft caps: those need the
    score matrix."""
    if changes.soft_cap is not None:
        return _blocked(q, k, v, _whole(mask, q, k), mask.causal)
    bias, causal = mask.bias, mask.causal
    if changes.slopes is not None:
        bias, causal = _with_slopes(q, k, mask, changes), False
    if bias is not None and bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    grouped = k.shape[1] < q.shape[1]
    if changes.sinks is None or q.is_meta:  # where there is no data, the same shapes and FLOPs
        return fused(q, k, v, bias, causal, grouped)
    if bias is None or q.device.type == "cpu":
        return with_sinks(q, k, v, changes.sinks, bias, causal)
    # The GPUs' kernel with a bias: a sink is the score of one more key, whose value is zero.
    sinks = changes.sinks.to(q.dtype)[:, None, None].expand(len(bias), -1, bias.shape[2], 1)
    bias = torch.cat((bias.to(q.dtype).expand(-1, q.shape[1], -1, -1), sinks), -1)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return fused(q, k, v, bias.expand(q.shape[0], -1, -1, -1), grouped=grouped)


def _with_slopes(q: Tensor, k: Tensor, mask: Mask, changes: ScoreChanges) -> Tensor:
    """The mask with ALiBi's bias, [H, S, T] or [B, H, S, T], of which layers keep one for all."""
    if mask.kept is not None and "slopes" in mask.kept:
        return mask.kept["slopes"]
    length, total = q.shape[2], k.shape[2]
    bias, slopes = _whole(mask, q, k).bias, changes.bias(total, q)
    assert slopes is not None
    bias = slopes.expand(-1, length, -1) if bias is None else bias.to(q.dtype) + slopes
    if mask.kept is not None:
        mask.kept["slopes"] = bias
    return bias


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool) -> Tensor:
    """Attention by its definition over blocks of queries, whose scores are computed again in backward. ``causal``: the
    last queries are of the last keys, and no query sees later ones."""
    parts, length, total = [], q.shape[2], k.shape[2]
    for start in range(0, length, CAPPED_ROWS):
        rows = slice(start, start + CAPPED_ROWS)
        keys = slice(0, min(total, total - length + rows.stop) if causal else total)
        bias = mask.bias
        bias = bias[..., rows, keys] if bias is not None and bias.shape[-2] > 1 else bias

        def compute(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            return naive_attention(q, k, v, mask._replace(bias=bias))

        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            part = checkpoint(compute, q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, use_reentrant=False)
            parts.append(part)
        else:
            parts.append(compute(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _whole(mask: Mask, q: Tensor, k: Tensor) -> Mask:
    """The mask with causality as a bias, of which layers keep one for all."""
    if not mask.causal:
        return mask
    if mask.kept is not None and "causal" in mask.kept:
        return mask._replace(bias=mask.kept["causal"], causal=False)
    length, total = q.shape[2], k.shape[2]
    seen = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
    bias = torch.zeros(length, total, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(~seen, torch.finfo(q.dtype).min / 2)
    bias = bias if mask.bias is None else bias + mask.bias
    if mask.kept is not None:
        mask.kept["causal"] = bias
    return mask._replace(bias=bias, causal=False)


BACKENDS: dict[str, AttentionBackend] = {
    b.name: b
    for b in (
        AttentionBackend("naive", naive_attention, wants_bias=True),
        AttentionBackend("flash", flash_attention, splits=True),
    )
}


def find_backend(name: str) -> AttentionBackend:
    """The backend called ``name``. Raises :class:`UserError` if there is none."""
    if name not in BACKENDS:
        raise unknown("attention backend", name, BACKENDS)
    return BACKENDS[name]


def project(attention: Attention, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, D], keys and values [B, S, G, D] of ``x`` [B, S, hidden], with rotary embedding applied."""
    return by_heads(attention, attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), rope)


def by_heads(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same from the projections' results [B, S, ·]."""
    # -1: under tensor parallelism a rank holds only its share of the heads.
    shape = (*q.shape[:2], -1, attention.head_dim)
    v = v.view(shape)
    if attention.q_norm is None or attention.k_norm is None:
        q, k = q.view(shape), k.view(shape)
    elif attention.joint_norm:
        q, k = attention.q_norm(q).view(shape), attention.k_norm(k).view(shape)
    else:
        q, k = attention.q_norm(q.view(shape)), attention.k_norm(k.view(shape))
    if rope is not None:
        q, k = rotate(q, rope, attention.interleaved), rotate(k, rope, attention.interleaved)
    return (q if attention.query_scale == 1 else q * attention.query_scale), k, v


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head (arXiv:2108.12409, section 3): a geometric sequence for a power of two of them, and
    every second one of the next power's where there are more."""
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / power)
    between = 2.0 ** (-4.0 / power)
    return tuple(first**i for i in range(1, power + 1)) + tuple(between**i for i in range(1, 2 * (heads - power), 2))


class SelfAttention(nn.Module):
    """What every kind of attention has. ``x`` [B, S, hidden] → [B, S, hidden]."""

    backend: AttentionBackend
    o_proj: nn.Linear

    @property
    def entrances(self) -> tuple[str, ...]:
        """Projections that read the layer's input."""
        raise NotImplementedError

    def inner_inputs(self) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
        """Sites between the entrances and the heads: name → the projection that reads it, and what computes it from the
        layer's input."""
        return {}


def _qk_norm(spec: ModelSpec, index: int, size: int) -> RMSNorm | UnweightedRMSNorm | None:
    """Layer ``index``'s norm over ``size`` elements of queries or keys."""
    if not spec.has_qk_norm(index):
        return None
    return RMSNorm(size, spec.norm_eps, spec.norm_offset) if spec.qk_norm_weight else UnweightedRMSNorm(spec.norm_eps)


class Attention(SelfAttention):
    """Self-attention with separate projections, so that adapters and quantizers can replace each."""

    def __init__(self, spec: ModelSpec, index: int = 0) -> None:
        super().__init__()
        h = spec.hidden_size
        self.head_dim, self.query_scale = spec.head_dim, spec.query_scale
        self.interleaved = spec.rope_interleaved
        self.backend = BACKENDS["flash"]
        self.q_proj = nn.Linear(h, spec.q_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(h, spec.kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(h, spec.kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_size, h, bias=spec.out_bias)
        self.joint_norm = spec.joint_qk_norm
        sizes = (spec.q_size, spec.kv_size) if spec.joint_qk_norm else (spec.head_dim, spec.head_dim)
        self.q_norm, self.k_norm = (_qk_norm(spec, index, size) for size in sizes)
        self.soft_cap = spec.attention_soft_cap
        self.slopes = alibi_slopes(spec.num_heads) if spec.position == "alibi" else None
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.attention_sinks else None
        self.project = project
        """Computes queries, keys and values; a technique may replace it by one merged product."""

    @property
    def entrances(self) -> tuple[str, ...]:
        """Queries, keys and values."""
        return ("q_proj", "k_proj", "v_proj")

    def changes(self) -> ScoreChanges:
        """What this layer does to its scores, for the heads on this rank."""
        sinks = None if self.sinks is None else local(self.sinks)
        return ScoreChanges(self.soft_cap, self.slopes, sinks)

    def keep_slopes(self, rank: int, ranks: int) -> None:
        """Where ranks divide the heads: keep ALiBi's slopes of this one's."""
        if self.slopes is not None:
            each = len(self.slopes) // ranks
            self.slopes = self.slopes[rank * each : (rank + 1) * each]

    def forward(self, x: Tensor, mask: Mask, rope: Rope | None = None, cache: LayerCache | None = None) -> Tensor:
        """``x`` [B, S, hidden] → [B, S, hidden]."""
        batch, length, _ = x.shape
        if rope is not None and cache is not None and cache.turns and not self.interleaved:
            mask, rope = mask._replace(rope=rope), None
        q, k, v = self.project(self, x, rope)
        if mask.scale is not None:
            q = (q * mask.scale).to(q.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.soft_cap is not None or self.slopes is not None or self.sinks is not None:
            mask = mask._replace(changes=self.changes())
        if cache is None:
            out = self.backend.function(q, k, v, mask)
        else:
            out = cache.attend(self.backend, q, k, v, mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected
