"""Attention of single new tokens over a paged pool in Triton, for CUDA devices (vLLM's paged attention,
arXiv:2309.06180; keys split over programs and merged as in flash decoding).

The pool holds keys and values as [G, slots, D]; a sequence's table names its blocks of ``block`` slots. A program takes
the query heads of one key head of one sequence and a part of its keys. Scores and sums are fp32. Imported only where
Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.model.attention import ScoreChanges

TILE = 64
"""Keys of one step of a program."""
_PROGRAMS = 264
"""Programs that fill a large device twice."""


@triton.jit
def _part(q, k, v, table, lengths, acc, stats, slopes, sinks, slots, blocks, groups, repeat, window, part, splits,
          scale, cap, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr,
          BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """Attention of one sequence's heads of one group over keys ``part * i`` to ``part * (i + 1)``."""
    b, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    first = (length - 1) // window * window if CHUNKED else tl.maximum(0, length - window)
    first = tl.maximum(s * part, first)
    last = tl.minimum((s + 1) * part, length)
    heads, wide = tl.arange(0, HEADS), tl.arange(0, PADDED)
    mine, inside = heads < repeat, wide < WIDTH
    at = ((b * groups + g) * repeat + heads)[:, None] * WIDTH + wide[None, :]
    query = tl.load(q + at, mine[:, None] & inside[None, :], other=0.0).to(tl.float32) * scale
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if SINKS:  # one more key, without a value, in the first part
        sink = tl.load(sinks + g * repeat + heads, mine, other=0.0)
        peak = tl.where(s == 0, sink, peak)
        total = tl.where(s == 0, 1.0, total)
    if SLOPES:
        slope = tl.load(slopes + g * repeat + heads, mine, other=0.0)
    out = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(first // TILE * TILE, last, TILE):
        n = start + tl.arange(0, TILE)
        visible = (n >= first) & (n < last)
        block = tl.load(table + b * blocks + n // BLOCK, visible, other=0)
        slot = g.to(tl.int64) * slots + block.to(tl.int64) * BLOCK + n % BLOCK
        place = slot[:, None] * WIDTH + wide[None, :]
        both = visible[:, None] & inside[None, :]
        keys = tl.load(k + place, both, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * keys[None, :, :], 2)
        if CAPPED:
            turned = tl.exp(-2.0 * tl.abs(scores) / cap)
            size = cap * (1.0 - turned) / (1.0 + turned)
            scores = tl.where(scores < 0, -size, size)
        if SLOPES:
            scores += slope[:, None] * (n + 1 - length)[None, :].to(tl.float32)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - higher))
        weights = tl.where(visible[None, :], tl.exp(scores - higher[:, None]), 0.0)
        values = tl.load(v + place, both, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.sum(weights[:, :, None] * values[None, :, :], 1)
        peak = higher
    row = ((b * groups + g) * repeat + heads) * splits + s
    tl.store(acc + row[:, None] * WIDTH + wide[None, :], out, mine[:, None] & inside[None, :])
    tl.store(stats + row * 2, peak, mine)
    tl.store(stats + row * 2 + 1, total, mine)


@triton.jit
def _merge(acc, stats, out, splits, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """Merge one head's parts, weighted by their fractions of the whole softmax sum."""
    row = tl.program_id(0)
    part, wide = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    there, inside = part < splits, wide < WIDTH
    peak = tl.load(stats + (row * splits + part) * 2, there, other=float("-inf"))
    total = tl.load(stats + (row * splits + part) * 2 + 1, there, other=0.0)
    weight = tl.where(total > 0, tl.exp(peak - tl.max(peak, 0)), 0.0)
    place = (row * splits + part)[:, None] * WIDTH + wide[None, :]
    parts = tl.load(acc + place, there[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * WIDTH + wide, merged.to(out.dtype.element_ty), inside)


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, block: int, window: int = 0,
    changes: ScoreChanges | None = None,
) -> Tensor:  # fmt: skip
    """Attention of ``q`` [B, H, D] over the pool ``keys`` and ``values`` [G, slots, D] → [B, H, D].

    ``table`` [B, blocks] int32 names each sequence's blocks of ``block`` slots, ``lengths`` [B] int32 its tokens;
    ``window``: newest tokens that are seen, 0: all, negative: those of the last chunk of so many. ``changes``: what
    happens to scores.
    """
    batch, heads, width = q.shape
    groups, slots, _ = keys.shape
    longest = table.shape[1] * block
    splits = max(1, min(triton.cdiv(longest, 4 * TILE), _PROGRAMS // (batch * groups)))
    part = triton.cdiv(triton.cdiv(longest, splits), TILE) * TILE
    splits = triton.cdiv(longest, part)
    acc = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    padded, repeat = triton.next_power_of_2(width), heads // groups
    changes = changes or ScoreChanges(None, None, None)
    slopes = out if changes.slopes is None else torch.tensor(changes.slopes, dtype=torch.float32, device=q.device)
    sinks = out if changes.sinks is None else changes.sinks.float().contiguous()
    _part[batch, groups, splits](
        q.contiguous(), keys, values, table, lengths, acc, stats, slopes, sinks, slots, table.shape[1], groups, repeat,
        abs(window) or 2**30, part, splits, width**-0.5, changes.soft_cap or 1.0, CHUNKED=window < 0,
        CAPPED=changes.soft_cap is not None, SLOPES=changes.slopes is not None, SINKS=changes.sinks is not None,
        BLOCK=block, WIDTH=width, PADDED=padded, HEADS=triton.next_power_of_2(repeat), TILE=TILE,
    )  # fmt: skip
    _merge[(batch * heads,)](acc, stats, out, splits, WIDTH=width, PADDED=padded, SPLITS=triton.next_power_of_2(splits))
    return out
