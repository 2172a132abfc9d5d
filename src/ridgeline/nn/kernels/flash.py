"""Fused attention for training in Triton, forward and backward, for CUDA devices (FlashAttention-2, arXiv:2307.08691),
where PyTorch's flash kernel does not compute what a model does: soft caps, ALiBi, windows that are chunks.

Rows of a batch are one run of T tokens. What tokens see is a span of it: of each query its oldest and newest key, and
of each key its first and last query (:func:`~ridgeline.nn.model.spans.make_spans`), so that documents, windows, chunks
and causality are one and the same here. Both ends of spans only grow from token to token: a program skips tiles outside
of its tokens' spans, and masks those alone that some of its tokens see and others do not. Scores and sums are fp32,
exponentials are of 2. In the backward pass a program of the first kernel has some queries and writes their gradients,
one of the second some keys, of which it goes through all query heads: nothing is added by atomic operations, and
results are the same in every run. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.quick import blocks, power, quick
from ridgeline.nn.kernels.target import shared_memory

LOG2E = 1.4426950408889634
TOGETHER = 128
"""Width of heads up to which one kernel computes the gradients of keys and values: of wider ones the sums of both are
more than registers hold, and scores are computed once more."""


@triton.jit
def _rows(x, start, row, at, wide, tokens, WIDTH: tl.constexpr):
    """Rows ``start + at`` of a head; zeros beyond the last token and the width."""
    place = x + tl.cast(start, tl.int64) * row + at[:, None] * row + wide[None, :]
    there = (start + at < tokens)[:, None]
    if wide.shape[0] > WIDTH:
        there = there & (wide < WIDTH)[None, :]
    return tl.load(place, there, other=0.0)


@triton.jit
def _exponents(dots, scale, cap, slope, away, CAPPED: tl.constexpr, SLOPES: tl.constexpr):
    """Exponents of 2, by what they are to be multiplied yet, and the hyperbolic tangent of a soft cap. ``away``: of the
    keys from a token, which all keys are compared to."""
    turned = dots
    if CAPPED:
        turned = 1.0 - 2.0 / (1.0 + tl.exp2(dots * scale))
        dots = turned * cap
    elif SLOPES:
        dots *= scale
    if SLOPES:
        dots += slope * away.to(tl.float32)
    if CAPPED or SLOPES:
        return dots, 1.0, turned
    return dots, scale, turned


@triton.jit
def _bounds(first, last, start, tokens, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Of ``SIZE`` tokens from ``start`` on, with spans from ``first`` to ``last``: where tiles begin that any of them
    sees, how many there are, and what all of them see, as a span. Those within that need no mask."""
    final = tl.minimum(start + SIZE, tokens) - 1
    begin = tl.load(first + start) // TILE * TILE
    return begin, tl.cdiv(tl.load(last + final) + 1 - begin, TILE), tl.load(first + final), tl.load(last + start)


@triton.jit
def _attend_tile(query, peak, total, out, k, v, at, masked, k_row, v_row, start, oldest, newest, tokens, slope, scale,
                 cap, CAPPED: tl.constexpr, SLOPES: tl.constexpr, WIDTH: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    """Add the keys from ``at`` on to what is known of some queries: largest exponents, sums of weights and values."""
    each, wide = tl.arange(0, TILE), tl.arange(0, query.shape[1])
    keys = _rows(k, at, k_row, each, wide, tokens, WIDTH)
    dots = tl.dot(query, tl.trans(keys), input_precision="ieee")
    exponents, unit, _ = _exponents(dots, scale, cap, slope, (at - start + each)[None, :], CAPPED, SLOPES)
    if masked:
        seen = (at + each >= oldest[:, None]) & (at + each <= newest[:, None])
        exponents = tl.where(seen, exponents, float("-inf"))
    higher = tl.maximum(peak, tl.max(exponents, 1) * unit)
    top = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has not seen any key
    shrink = tl.exp2(peak - top)
    weights = tl.exp2(exponents * unit - top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    values = _rows(v, at, v_row, each, wide, tokens, WIDTH)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="ieee")
    return higher, total, out


@quick
@triton.jit
def _attend_spans(q, k, v, out, lse, spans, slopes, sinks, tokens, heads, repeat, q_row, q_head, k_row, k_head, v_row,
                  v_head, scale, cap, CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr,
                  WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Output and logarithm (of 2) of the softmax's denominator of ``SIZE`` queries of a head."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * SIZE  # those that see most keys first
    head = tl.program_id(1)
    each, wide = tl.arange(0, SIZE), tl.arange(0, PADDED)
    begin, count, low, high = _bounds(spans, spans + tokens, start, tokens, SIZE, TILE)
    place = tl.minimum(start + each, tokens - 1)
    oldest, newest = tl.load(spans + place), tl.load(spans + tokens + place)
    query = _rows(q + head * q_head, start, q_row, each, wide, tokens, WIDTH)
    k += head // repeat * k_head
    v += head // repeat * v_head
    peak = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head)
    if SINKS:  # one more key, without a value
        peak = tl.load(sinks + head) * 1.4426950408889634 + slope * each.to(tl.float32)
        total += 1.0
    result = tl.zeros([SIZE, PADDED], tl.float32)
    for i in range(0, count):
        at = begin + i * TILE
        peak, total, result = _attend_tile(
            query, peak, total, result, k, v, at, (at < low) | (at + TILE - 1 > high), k_row, v_row, start, oldest,
            newest, tokens, slope, scale, cap, CAPPED, SLOPES, WIDTH, TILE,
        )  # fmt: skip
    there = start + each < tokens
    to = out + (start.to(tl.int64) * heads + head) * WIDTH + each[:, None] * (heads * WIDTH) + wide[None, :]
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, result, there[:, None] & (wide < WIDTH)[None, :])
    # Of exponents that are compared to the query's own place, as ALiBi's are of no other's in the backward pass.
    tl.store(lse + head.to(tl.int64) * tokens + start + each, peak + tl.log2(total) - slope * each.to(tl.float32),
             there)  # fmt: skip


@triton.jit
def _query_tile(query, grad, lse, delta, dq, k, v, at, masked, k_row, v_row, start, oldest, newest, tokens, slope,
                scale, cap, CAPPED: tl.constexpr, SLOPES: tl.constexpr, WIDTH: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """Add what the keys from ``at`` on make of the gradients of some queries."""
    each, wide = tl.arange(0, TILE), tl.arange(0, query.shape[1])
    keys = _rows(k, at, k_row, each, wide, tokens, WIDTH)
    dots = tl.dot(query, tl.trans(keys), input_precision="ieee")
    exponents, unit, turned = _exponents(dots, scale, cap, slope, (at - start + each)[None, :], CAPPED, SLOPES)
    weights = tl.exp2(exponents * unit - lse[:, None])
    if masked:
        seen = (at + each >= oldest[:, None]) & (at + each <= newest[:, None])
        weights = tl.where(seen, weights, 0.0)
    values = _rows(v, at, v_row, each, wide, tokens, WIDTH)
    d = weights * (tl.dot(grad, tl.trans(values), input_precision="ieee") - delta[:, None])
    if CAPPED:
        d *= 1.0 - turned * turned
    return tl.dot(d.to(keys.dtype), keys, dq, input_precision="ieee")


@quick
@triton.jit
def _queries_backward(q, k, v, out, grad, lse, delta, dq, spans, slopes, tokens, heads, repeat, q_row, q_head, k_row,
                      k_head, v_row, v_head, g_row, g_head, factor, scale, cap, CAPPED: tl.constexpr,
                      SLOPES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
                      TILE: tl.constexpr):  # fmt: skip
    """Gradients of ``SIZE`` queries of a head, and the sums of output times its gradient, ``delta``, which the keys'
    gradients need too."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * SIZE
    head = tl.program_id(1)
    each, wide = tl.arange(0, SIZE), tl.arange(0, PADDED)
    begin, count, low, high = _bounds(spans, spans + tokens, start, tokens, SIZE, TILE)
    place, there = tl.minimum(start + each, tokens - 1), start + each < tokens
    oldest, newest = tl.load(spans + place), tl.load(spans + tokens + place)
    d = _rows(grad + head * g_head, start, g_row, each, wide, tokens, WIDTH)
    result = _rows(out + head * WIDTH, start, heads * WIDTH, each, wide, tokens, WIDTH)
    sums = tl.sum(d.to(tl.float32) * result.to(tl.float32), 1)
    line = head.to(tl.int64) * tokens + start + each
    tl.store(delta + line, sums, there)
    query = _rows(q + head * q_head, start, q_row, each, wide, tokens, WIDTH)
    k += head // repeat * k_head
    v += head // repeat * v_head
    total = tl.load(lse + line, there, other=0.0)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head)
        total += slope * each.to(tl.float32)
    found = tl.zeros([SIZE, PADDED], tl.float32)
    for i in range(0, count):
        at = begin + i * TILE
        found = _query_tile(
            query, d, total, sums, found, k, v, at, (at < low) | (at + TILE - 1 > high), k_row, v_row, start, oldest,
            newest, tokens, slope, scale, cap, CAPPED, SLOPES, WIDTH, TILE,
        )  # fmt: skip
    to = dq + (start.to(tl.int64) * heads + head) * WIDTH + each[:, None] * (heads * WIDTH) + wide[None, :]
    tl.store(to, (found * factor).to(dq.dtype.element_ty), there[:, None] & (wide < WIDTH)[None, :])


@triton.jit
def _key_tile(keys, values, dk, dv, q, grad, lse, delta, at, masked, q_row, g_row, start, first, last, tokens, slope,
              scale, cap, KEYS: tl.constexpr, VALUES: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
              WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Add what the queries from ``at`` on make of the gradients of some keys and values. Scores are [keys, queries]."""
    each, own, wide = tl.arange(0, TILE), tl.arange(0, keys.shape[0]), tl.arange(0, keys.shape[1])
    query = _rows(q, at, q_row, each, wide, tokens, WIDTH)
    there = at + each < tokens
    dots = tl.dot(keys, tl.trans(query), input_precision="ieee")
    total = tl.load(lse + at + each, there, other=0.0)
    if SLOPES:
        total += slope * (at - start + each).to(tl.float32)
    exponents, unit, turned = _exponents(dots, scale, cap, slope, own[:, None], CAPPED, SLOPES)
    weights = tl.exp2(exponents * unit - total[None, :])
    if masked:
        seen = (at + each >= first[:, None]) & (at + each <= last[:, None])
        weights = tl.where(seen, weights, 0.0)
    sums = tl.load(delta + at + each, there, other=0.0)
    d = _rows(grad, at, g_row, each, wide, tokens, WIDTH)
    if VALUES:
        dv = tl.dot(weights.to(d.dtype), d, dv, input_precision="ieee")
    if KEYS:
        d = weights * (tl.dot(values, tl.trans(d), input_precision="ieee") - sums[None, :])
        if CAPPED:
            d *= 1.0 - turned * turned
        dk = tl.dot(d.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@quick
@triton.jit
def _keys_backward(q, k, v, grad, lse, delta, dk, dv, spans, slopes, tokens, groups, repeat, q_row, q_head, k_row,
                   k_head, v_row, v_head, g_row, g_head, factor, scale, cap, KEYS: tl.constexpr, VALUES: tl.constexpr,
                   CAPPED: tl.constexpr, SLOPES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                   SIZE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Gradients of ``SIZE`` keys, values or both of a key head, from all query heads that share it. Rows beyond the
    last token hold anything, and are not stored."""
    start, group = tl.program_id(0) * SIZE, tl.program_id(1)
    each, wide = tl.arange(0, SIZE), tl.arange(0, PADDED)
    begin, count, low, high = _bounds(spans + 2 * tokens, spans + 3 * tokens, start, tokens, SIZE, TILE)
    place, there = tl.minimum(start + each, tokens - 1), start + each < tokens
    first, last = tl.load(spans + 2 * tokens + place), tl.load(spans + 3 * tokens + place)
    keys = _rows(k + group * k_head, start, k_row, each, wide, tokens, WIDTH)
    values = keys  # if not used
    if KEYS:
        values = _rows(v + group * v_head, start, v_row, each, wide, tokens, WIDTH)
    of_keys, of_values = tl.zeros([SIZE, PADDED], tl.float32), tl.zeros([SIZE, PADDED], tl.float32)
    for i in range(0, repeat * count):
        head, at = group * repeat + i // count, begin + i % count * TILE
        slope = 0.0
        if SLOPES:
            slope = tl.load(slopes + head)
        line = tl.cast(head, tl.int64) * tokens
        of_keys, of_values = _key_tile(
            keys, values, of_keys, of_values, q + head * q_head, grad + head * g_head, lse + line, delta + line, at,
            (at < low) | (at + TILE - 1 > high), q_row, g_row, start, first, last, tokens, slope, scale, cap, KEYS,
            VALUES, CAPPED, SLOPES, WIDTH, TILE,
        )  # fmt: skip
    to = (start.to(tl.int64) * groups + group) * WIDTH + each[:, None] * (groups * WIDTH) + wide[None, :]
    inside = there[:, None] & (wide < WIDTH)[None, :]
    if KEYS:
        tl.store(dk + to, (of_keys * factor).to(dk.dtype.element_ty), inside)
    if VALUES:
        tl.store(dv + to, of_values.to(dv.dtype.element_ty), inside)


class Tiles(NamedTuple):
    """Of a kernel: tokens of a program, tokens of a tile that it goes through, warps, and tiles on their way."""

    size: int
    tile: int
    warps: int
    stages: int

    def settings(self) -> dict[str, int]:
        """As the launch has them."""
        return {"SIZE": self.size, "TILE": self.tile, "num_warps": self.warps, "num_stages": self.stages}


_NARROW = Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2)
_SMALL = Tiles(64, 64, 8, 2)
_TILES = {
    227: {64: _NARROW, 128: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
          256: (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2))},
    163: {64: _NARROW, 112: (Tiles(128, 64, 8, 3), _SMALL, Tiles(64, 32, 8, 2)),
          128: (Tiles(128, 64, 8, 3), _SMALL, _SMALL),
          256: (Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2))},
    99: {64: _NARROW, 112: (Tiles(128, 64, 8, 2), _SMALL, Tiles(64, 32, 8, 2)),
         128: (Tiles(128, 64, 8, 2), _SMALL, _SMALL),
         256: (Tiles(64, 32, 8, 2), Tiles(64, 16, 8, 2), Tiles(64, 16, 8, 2))},
}  # fmt: skip
"""Of the forward pass, of queries' gradients and of keys', by shared memory in KB and by widths of heads up to which
they are for. No more than what compiles for 8.0, 9.0 and 10.0 without spilled registers, with soft caps too. From
Hopper on, with 227 KB, programs hold 128 rows, as its tensor cores multiply 64 rows for four warps."""


def tiles(width: int) -> tuple[Tiles, Tiles, Tiles]:
    """Those for heads of ``width`` on this device."""
    rows = next(rows for size, rows in _TILES.items() if size << 10 <= shared_memory())
    return next(found for most, found in rows.items() if width <= most)


def _common(q: Tensor, soft_cap: float | None, slopes: Tensor | None) -> tuple[float, float, float, dict[str, int]]:
    """What gradients of scores are multiplied by, the scale of scores, soft caps, and constants."""
    width = q.shape[2]
    factor = width**-0.5
    scale = factor * LOG2E if soft_cap is None else 2 * factor * LOG2E / soft_cap
    constants = {"CAPPED": soft_cap is not None, "SLOPES": slopes is not None, "WIDTH": width,
                 "PADDED": max(16, power(width))}  # fmt: skip
    return factor, scale, (soft_cap or 1.0) * LOG2E, constants


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, soft_cap: float | None, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, H, D], and the logarithms of 2 of the softmax's denominators, fp32 [H, T], of ``q`` [T, H, D], ``k``
    and ``v`` [T, G, D] (any strides but the last). ``spans`` [4, T] int32; ``slopes`` and ``sinks`` fp32 [H], the
    slopes of exponents of 2."""
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    _, scale, cap, constants = _common(q, soft_cap, slopes)
    chosen = tiles(q.shape[2])[0]
    _attend_spans[blocks(tokens, chosen.size), heads](
        q, k, v, out, lse, spans, lse if slopes is None else slopes, lse if sinks is None else sinks, tokens, heads,
        heads // k.shape[1], q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), scale, cap,
        SINKS=sinks is not None, **constants, **chosen.settings(),
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Tensor, soft_cap: float | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`forward`'s ``q``, ``k`` and ``v``, and the sums of output times its gradient ``grad``
    [T, H, D], fp32 [H, T]."""
    tokens, heads, _ = q.shape
    groups = k.shape[1]
    delta = torch.empty_like(lse)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    factor, scale, cap, constants = _common(q, soft_cap, slopes)
    _, of_queries, of_keys = tiles(q.shape[2])
    strides = [t.stride(i) for t in (q, k, v, grad) for i in (0, 1)]
    slope = lse if slopes is None else slopes
    _queries_backward[blocks(tokens, of_queries.size), heads](
        q, k, v, out, grad, lse, delta, dq, spans, slope, tokens, heads, heads // groups, *strides, factor, scale, cap,
        **constants, **of_queries.settings(),
    )  # fmt: skip
    parts = ((True, True),) if constants["PADDED"] <= TOGETHER else ((False, True), (True, False))
    for keys, values in parts:
        _keys_backward[blocks(tokens, of_keys.size), groups](
            q, k, v, grad, lse, delta, dk, dv, spans, slope, tokens, groups, heads // groups, *strides, factor, scale,
            cap, KEYS=keys, VALUES=values, **constants, **of_keys.settings(),
        )  # fmt: skip
    return dq, dk, dv, delta
