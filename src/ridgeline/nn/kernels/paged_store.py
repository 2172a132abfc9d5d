"""Writing a step's keys and values to a paged pool in Triton, for CUDA devices: both in one launch, quantized as
:mod:`ridgeline.nn.quant.quantized_kv` does; where queries and keys are still to be turned (rotary embedding), in the
same launch. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.early import FEW, prefetch, wait
from ridgeline.nn.kernels.quick import blocks, power, quick
from ridgeline.nn.kernels.target import capability
from ridgeline.nn.model.rotary import Rope
from ridgeline.nn.quant.quantized_kv import ByteCodes, Codes, FloatCodes, NibbleCodes

HEADS = 4
"""Heads of queries that a program turns."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds to the nearest integer."""


@triton.jit
def _half_scale(span):
    """A scale as it is stored."""
    return tl.minimum(tl.maximum(span, 5.9604644775390625e-08), 65504.0).to(tl.float16)


@triton.jit
def _read(x, at, inside, cosine, sine, TURNED: tl.constexpr):
    """Numbers ``at`` of a head, of which the first ``TURNED`` are turned by the angles of a row of the tables, as they
    are stored."""
    held = tl.load(x + at, inside, other=0.0)
    out = held.to(tl.float32)
    if TURNED > 0:
        both = inside & (at < TURNED)
        other = tl.load(x + tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2), both, other=0.0)
        c = tl.load(cosine + at, both, other=1.0).to(tl.float32)
        s = tl.load(sine + at, both, other=0.0).to(tl.float32)
        out = (out * c + s * other.to(tl.float32)).to(held.dtype).to(tl.float32)
    return out


@triton.jit
def _turn(q, cosine, sine, head, heads, stride, TURNED: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """``HEADS`` heads of one row of queries from ``head`` on, in place: a thread has both numbers of a pair."""
    at, heads_of = tl.arange(0, HALF), head + tl.arange(0, HEADS)
    inside = at < TURNED // 2
    c1 = tl.load(cosine + at, inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cosine + TURNED // 2 + at, inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sine + at, inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sine + TURNED // 2 + at, inside, other=0.0).to(tl.float32)[None, :]
    place = q + heads_of[:, None] * stride + at[None, :]
    both = (heads_of < heads)[:, None] & inside[None, :]
    low = tl.load(place, both, other=0.0).to(tl.float32)
    high = tl.load(place + TURNED // 2, both, other=0.0).to(tl.float32)
    tl.store(place, (low * c1 + s1 * high).to(q.dtype.element_ty), both)
    tl.store(place + TURNED // 2, (high * c2 + s2 * low).to(q.dtype.element_ty), both)


@triton.jit
def _one(x, codes, scale, least, spot, cosine, sine, TURNED: tl.constexpr, STORED: tl.constexpr, PADDED: tl.constexpr,
         KIND: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """A token's row of one head, from ``x``, to row ``spot`` of a store: plain (``KIND`` 0), bytes with a scale (1),
    nibbles (2) with scale and minimum for each half, or for both (``SHARED``), or fp8 (3)."""
    at = tl.arange(0, PADDED)
    inside = at < STORED
    low = _read(x, at, inside, cosine, sine, TURNED)
    if KIND == 0:
        tl.store(codes + spot * STORED + at, low.to(codes.dtype.element_ty), inside)
    elif KIND == 1:
        held = _half_scale(tl.div_rn(tl.max(tl.abs(low), 0), 127.0))
        rounded = (tl.div_rn(low, held.to(tl.float32)) + _ROUND) - _ROUND
        tl.store(scale + spot, held)
        tl.store(codes + spot * STORED + at, tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8), inside)
    elif KIND == 3:
        held = tl.maximum(low, -448.0, propagate_nan=tl.PropagateNan.ALL)
        held = tl.minimum(held, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + spot * STORED + at, held.to(codes.dtype.element_ty), inside)
    else:
        high = _read(x, STORED + at, inside, cosine, sine, TURNED)
        bottom = tl.min(tl.where(inside, low, float("inf")), 0)
        top = tl.max(tl.where(inside, low, float("-inf")), 0)
        bottom_high = tl.min(tl.where(inside, high, float("inf")), 0)
        top_high = tl.max(tl.where(inside, high, float("-inf")), 0)
        if SHARED:
            bottom = tl.minimum(bottom, bottom_high)
            top = tl.maximum(top, top_high)
            bottom_high = bottom
            top_high = top
        first = bottom.to(tl.float16)
        second = bottom_high.to(tl.float16)
        held = _half_scale(tl.div_rn(top - first.to(tl.float32), 15.0))
        held_high = _half_scale(tl.div_rn(top_high - second.to(tl.float32), 15.0))
        low = (tl.div_rn(low - first.to(tl.float32), held.to(tl.float32)) + _ROUND) - _ROUND
        high = (tl.div_rn(high - second.to(tl.float32), held_high.to(tl.float32)) + _ROUND) - _ROUND
        low = tl.minimum(tl.maximum(low, 0.0), 15.0).to(tl.int32)
        high = tl.minimum(tl.maximum(high, 0.0), 15.0).to(tl.int32)
        tl.store(codes + spot * STORED + at, (low | (high << 4)).to(tl.uint8), inside)
        GROUPS: tl.constexpr = 1 if SHARED else 2
        tl.store(least + spot * GROUPS, first)
        tl.store(scale + spot * GROUPS, held)
        if not SHARED:
            tl.store(least + spot * GROUPS + 1, second)
            tl.store(scale + spot * GROUPS + 1, held_high)


@quick
@triton.jit
def _write(k, v, q, cosine, sine, slots, k_codes, k_scale, k_least, v_codes, v_scale, v_least, pool, groups, heads,
           k_head, k_row, v_head, v_row, q_head, q_row, TURNED: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
           STORED: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
           EARLY: tl.constexpr = False):  # fmt: skip
    """A program for each token and each head of keys and values, and for some heads of queries."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosine += row * TURNED
    sine += row * TURNED
    if EARLY and tl.num_programs(0) <= FEW:
        prefetch(slots + row)
        if TURNED > 0:
            prefetch(cosine)
            prefetch(cosine + TURNED // 2)
            prefetch(sine)
            prefetch(sine + TURNED // 2)
    wait(EARLY)
    if part < groups:
        spot = part.to(tl.int64) * pool + tl.load(slots + row)
        _one(k + part * k_head + row * k_row, k_codes, k_scale, k_least, spot, cosine, sine, TURNED, STORED, PADDED,
             KIND, SHARED)  # fmt: skip
    elif part < 2 * groups:
        spot = (part - groups).to(tl.int64) * pool + tl.load(slots + row)
        _one(v + (part - groups) * v_head + row * v_row, v_codes, v_scale, v_least, spot, cosine, sine, 0, STORED,
             PADDED, KIND, SHARED)  # fmt: skip
    elif TURNED > 0:
        _turn(q + row * q_row, cosine, sine, (part - 2 * groups) * HEADS, heads, q_head, TURNED, HALF, HEADS)


def store_tokens(keys: Tensor | Codes, values: Tensor | Codes, slots: Tensor, k: Tensor, v: Tensor,
                 q: Tensor | None = None, rope: Rope | None = None) -> bool:  # fmt: skip
    """Write ``k`` and ``v`` [1, G, T, D] (any strides but the last) to the slots [T] of two stores, tensors or codes.
    With ``rope``, tables [T, 1, R] each, the first R numbers of each head of keys are turned on the way, and those of
    the queries ``q`` [1, H, T, D] in place. False, and nothing is written, for codes that this does not make: fp8 where
    the device has none, and groups of less than half a head."""
    width = k.shape[3]
    if isinstance(keys, Tensor):
        kind, parts = 0, [(s, s, s) for s in (keys, values) if isinstance(s, Tensor)]
    elif isinstance(keys, ByteCodes):
        kind, parts = 1, [(s.codes, s.scale, s.scale) for s in (keys, values) if isinstance(s, ByteCodes)]
    elif isinstance(keys, NibbleCodes) and 2 * keys.group >= width:
        kind, parts = 2, [(s.codes, s.scale, s.least) for s in (keys, values) if isinstance(s, NibbleCodes)]
    elif isinstance(keys, FloatCodes) and capability() >= 89:
        kind, parts = 3, [(s.codes, s.codes, s.codes) for s in (keys, values) if isinstance(s, FloatCodes)]
    else:
        return False
    stored, groups, count = parts[0][0].shape[3], k.shape[1], k.shape[2]
    turned, heads = (0, 0) if q is None or rope is None else (rope[0].shape[-1], q.shape[1])
    cosine, sine = (k, k) if rope is None else (t.contiguous() for t in rope)
    queries = k if q is None else q
    _write[count, 2 * groups + blocks(heads, HEADS)](
        k, v, queries, cosine, sine, slots, *parts[0], *parts[1], parts[0][0].shape[2], groups, heads, k.stride(1),
        k.stride(2), v.stride(1), v.stride(2), queries.stride(1), queries.stride(2), TURNED=turned,
        HALF=power(max(2, turned) // 2), HEADS=HEADS, STORED=stored,
        PADDED=power(stored), KIND=kind,
        SHARED=isinstance(keys, NibbleCodes) and keys.group == width, num_warps=1,
    )  # fmt: skip
    return True
