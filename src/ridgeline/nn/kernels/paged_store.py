"""Writing a step's keys and values to a paged pool in Triton, for CUDA devices: both in one launch, quantized as
:mod:`ridgeline.nn.quant.quantized_kv` does. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.quant.quantized_kv import ByteCodes, Codes, NibbleCodes

_ROUND = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds to the nearest integer."""


@triton.jit
def _half_scale(span):
    """A scale as it is stored."""
    return tl.minimum(tl.maximum(span, 5.9604644775390625e-08), 65504.0).to(tl.float16)


@triton.jit
def _one(x, codes, scale, least, spot, STORED: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr,
         SHARED: tl.constexpr):  # fmt: skip
    """A token's row of one head, from ``x``, to row ``spot`` of a store: plain (``KIND`` 0), bytes with a scale (1), or
    nibbles (2) with scale and minimum for each half, or for both (``SHARED``)."""
    at = tl.arange(0, PADDED)
    inside = at < STORED
    low = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if KIND == 0:
        tl.store(codes + spot * STORED + at, low.to(codes.dtype.element_ty), inside)
    elif KIND == 1:
        held = _half_scale(tl.div_rn(tl.max(tl.abs(low), 0), 127.0))
        rounded = (tl.div_rn(low, held.to(tl.float32)) + _ROUND) - _ROUND
        tl.store(scale + spot, held)
        tl.store(codes + spot * STORED + at, tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8), inside)
    else:
        high = tl.load(x + STORED + at, inside, other=0.0).to(tl.float32)
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


@triton.jit
def _write(k, v, slots, k_codes, k_scale, k_least, v_codes, v_scale, v_least, pool, k_head, k_row, v_head, v_row,
           STORED: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    spot = head * pool + tl.load(slots + row)
    if tl.program_id(2) == 0:
        _one(k + head * k_head + row * k_row, k_codes, k_scale, k_least, spot, STORED, PADDED, KIND, SHARED)
    else:
        _one(v + head * v_head + row * v_row, v_codes, v_scale, v_least, spot, STORED, PADDED, KIND, SHARED)


def store_tokens(keys: Tensor | Codes, values: Tensor | Codes, slots: Tensor, k: Tensor, v: Tensor) -> bool:
    """Write ``k`` and ``v`` [1, G, T, D] (any strides but the last) to the slots [T] of two stores, tensors or codes.
    False, and nothing is written, for codes that this does not make: fp8, and groups of less than half a head."""
    width = k.shape[3]
    if isinstance(keys, Tensor):
        kind, parts = 0, [(s, s, s) for s in (keys, values) if isinstance(s, Tensor)]
    elif isinstance(keys, ByteCodes):
        kind, parts = 1, [(s.codes, s.scale, s.scale) for s in (keys, values) if isinstance(s, ByteCodes)]
    elif isinstance(keys, NibbleCodes) and 2 * keys.group >= width:
        kind, parts = 2, [(s.codes, s.scale, s.least) for s in (keys, values) if isinstance(s, NibbleCodes)]
    else:
        return False
    stored = parts[0][0].shape[3]
    _write[k.shape[2], k.shape[1], 2](
        k, v, slots, *parts[0], *parts[1], parts[0][0].shape[2], k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        STORED=stored, PADDED=triton.next_power_of_2(stored), KIND=kind,
        SHARED=isinstance(keys, NibbleCodes) and keys.group == width, num_warps=1,
    )  # fmt: skip
    return True
