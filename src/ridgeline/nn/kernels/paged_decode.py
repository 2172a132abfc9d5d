"""Attention of few new tokens over a paged pool in Triton, for CUDA devices: each warp has keys of its own.

The warps of a program divide a tile's keys, and each keeps its own largest scores and sums, so that none waits for
another but for the copies of a tile; their sums are merged at the end. What :mod:`.paged_attention` says holds here.
Codes become numbers of 16 bits by few instructions: nibbles and bytes are put into a mantissa. Imported only where
Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.nn.kernels.e4m3 import widened
from ridgeline.nn.kernels.paged_rows import changed, leave, rows_and_keys
from ridgeline.nn.kernels.quick import quick

WARPS, ROWS = 4, 8
"""Of a program: warps, and query heads that share a key head."""
EACH = {"plain": 16, "int8": 32, "int4": 32, "fp8": 32, "native fp8": 32}
"""Keys of a warp in one tile, by the kind of the pool."""
OWN = {"int8", "int4", "fp8", "native fp8"}
"""Kinds of pools whose keys are divided between warps."""
STAGES = 5
"""By which two tiles are on their way: the blocks' numbers are asked for one tile ahead."""

# Four bytes as two pairs of bf16: the lower seven bits plus 128, less 128 or 256 by the highest one, which is turned
# first: two's complement.
_BYTES_BF16 = """{
.reg .b32 s, t, u, v, m;
mov.b32 m, 0xbf80bf80;
xor.b32 s, $2, 0x80808080;
prmt.b32 t, s, 0, 0x4140;
prmt.b32 v, s, 0, 0x4342;
lop3.b32 u, t, 0x00800080, 0x43804380, 0x6a;
lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, u, m, t;
lop3.b32 u, v, 0x00800080, 0x43804380, 0x6a;
lop3.b32 v, v, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $1, u, m, v;
}"""
# The same of fp16, whose mantissa holds a byte: 1024 + 128 + code.
_BYTES_F16 = """{
.reg .b32 s, e;
mov.b32 e, 0x64646464;
xor.b32 s, $2, 0x80808080;
prmt.b32 $0, s, e, 0x4140;
prmt.b32 $1, s, e, 0x4342;
}"""
# The low nibbles of four bytes (moved down by 0 bits) or the high ones (4), plus 128 in bf16, 1024 in fp16.
_NIBBLES = """{{
.reg .b32 s, t, v;
shr.b32 s, $2, {0};
prmt.b32 t, s, 0, 0x4140;
prmt.b32 v, s, 0, 0x4342;
lop3.b32 $0, t, 0x000f000f, {1}, 0xea;
lop3.b32 $1, v, 0x000f000f, {1}, 0xea;
}}"""
BYTES_BF16, BYTES_F16 = tl.constexpr(_BYTES_BF16), tl.constexpr(_BYTES_F16)
LOW_BF16, HIGH_BF16 = (tl.constexpr(_NIBBLES.format(down, "0x43004300")) for down in (0, 4))
LOW_F16, HIGH_F16 = (tl.constexpr(_NIBBLES.format(down, "0x64006400")) for down in (0, 4))


@triton.jit
def _numbers(codes, KIND: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr, RAISED: tl.constexpr,
             ASSEMBLY: tl.constexpr):  # fmt: skip
    """Codes as numbers of ``dtype``. ``RAISED``: int8 by 128, and nibbles and int8 by 128 in bf16 and fp32, by 1024 in
    fp16, which saves an instruction."""
    TOP: tl.constexpr = 1024 if dtype == tl.float16 else 128
    if ASSEMBLY and KIND == 1 and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    elif ASSEMBLY and KIND == 1 and dtype == tl.float16:
        raised = tl.inline_asm_elementwise(BYTES_F16, "=r,=r,r", [codes], tl.float16, True, 4)
        return raised if RAISED else raised - 1152.0
    elif KIND == 1:
        return (codes.to(tl.int32) + (TOP + 128 if RAISED else 0)).to(dtype)
    elif KIND == 2 and ASSEMBLY and (dtype == tl.bfloat16 or dtype == tl.float16):
        if dtype == tl.bfloat16 and HALF == 0:
            raised = tl.inline_asm_elementwise(LOW_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
        elif dtype == tl.bfloat16:
            raised = tl.inline_asm_elementwise(HIGH_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
        elif HALF == 0:
            raised = tl.inline_asm_elementwise(LOW_F16, "=r,=r,r", [codes], tl.float16, True, 4)
        else:
            raised = tl.inline_asm_elementwise(HIGH_F16, "=r,=r,r", [codes], tl.float16, True, 4)
        return raised if RAISED else raised - TOP
    elif KIND == 2:
        return (((codes.to(tl.int32) >> (4 * HALF)) & 15) + (TOP if RAISED else 0)).to(dtype)
    elif KIND == 3:
        return widened(codes, dtype)
    elif KIND == 4:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def _half_of(words, high):
    """One half of words of 32 bits, as the fp16 that it is, in fp32. ``high``: 0 or 1."""
    return (words >> (16 * high)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scores(lows, highs, sums_low, sums_high, codes, scale, least, slot, KIND: tl.constexpr, TOP: tl.constexpr,
            ASSEMBLY: tl.constexpr):  # fmt: skip
    """Products [WARPS, EACH, ROWS] of each warp's keys with the queries, ``lows`` and of nibbles ``highs`` [WARPS,
    STORED, ROWS], whose sums are taken off with what codes have on top. ``slot``: where scales stand [WARPS, EACH]."""
    keys = _numbers(codes, KIND, 0, lows.dtype, TOP > 0, ASSEMBLY)
    scores = tl.dot(keys, lows, input_precision="ieee")
    if KIND == 1:
        by = _half_of(tl.load(scale + slot // 2), (slot % 2).to(tl.int32))[:, :, None]
        scores = (scores - (TOP + 128.0) * sums_low) * by
    if KIND == 2:
        words, leasts = tl.load(scale + slot), tl.load(least + slot)
        by = _half_of(words, 0)[:, :, None]
        scores = scores * by + sums_low * (_half_of(leasts, 0)[:, :, None] - TOP * by)
        others = tl.dot(_numbers(codes, KIND, 1, lows.dtype, True, ASSEMBLY), highs, input_precision="ieee")
        by = _half_of(words, 1)[:, :, None]
        scores += others * by + sums_high * (_half_of(leasts, 1)[:, :, None] - TOP * by)
    return scores


@triton.jit
def _add_values(weights, out_low, out_high, rest_low, rest_high, codes, shrink, scale, least, slot, KIND: tl.constexpr,
                dtype: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    """What is summed so far, which ``shrink`` multiplies, with values by their ``weights``."""
    values = _numbers(codes, KIND, 0, dtype, False, ASSEMBLY)
    out_low = out_low * shrink[:, None, :]
    if KIND == 2:
        words, leasts = tl.load(scale + slot), tl.load(least + slot)
        rest_low = rest_low * shrink + tl.sum(weights * _half_of(leasts, 0)[:, :, None], 1)
        rest_high = rest_high * shrink + tl.sum(weights * _half_of(leasts, 1)[:, :, None], 1)
        scaled = (weights * _half_of(words, 0)[:, :, None]).to(dtype)
        out_low = tl.dot(values, scaled, out_low, input_precision="ieee")
        scaled = (weights * _half_of(words, 1)[:, :, None]).to(dtype)
        values = _numbers(codes, KIND, 1, dtype, False, ASSEMBLY)
        out_high = tl.dot(values, scaled, out_high * shrink[:, None, :], input_precision="ieee")
    else:
        if KIND == 1:
            weights *= _half_of(tl.load(scale + slot // 2), (slot % 2).to(tl.int32))[:, :, None]
        out_low = tl.dot(values, weights.to(dtype), out_low, input_precision="ieee")
    return out_low, out_high, rest_low, rest_high


@quick
@triton.jit
def _attend_few(q, k, k_scale, k_least, v, v_scale, v_least, out, acc, stats, work, table, lengths, starts, slopes,
                sinks, slots, blocks, groups, repeat, q_row, q_head, window, splits, scale, cap, KIND: tl.constexpr,
                WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
                SINKS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr,
                ROWS: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr, LEAST: tl.constexpr,
                STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """``ROWS`` rows of one sequence and one key head over one part of the keys that they see.

    ``STORED``: numbers in a stored row, a power of two. Scales (``KIND`` 1 and 2) are read as words of two: those of
    two slots where a slot has one, of both halves of a head where it has two.
    """
    TILE: tl.constexpr = EACH * WARPS
    g, s = tl.program_id(1), tl.program_id(2)
    b, length, start, query, head, mine, position, _, oldest, begin, end = rows_and_keys(
        work, table, lengths, starts, repeat, window, splits, CHUNKED, ROWS, TILE, LEAST, EARLY
    )
    if not SPLIT:  # noqa: SIM102
        if begin >= end:  # of an empty sequence
            return
    wide = tl.arange(0, STORED)
    place = q + (start + query).to(tl.int64)[None, :] * q_row + head[None, :] * q_head + wide[:, None]
    low = tl.load(place, mine[None, :], other=0.0)
    dtype: tl.constexpr = low.dtype
    # Keys of bytes are multiplied in fp16: to which fp8 is converted in one instruction, and whose mantissa holds int8.
    key_dtype: tl.constexpr = tl.float16 if KIND != 0 and KIND != 2 and dtype == tl.bfloat16 else dtype
    value_dtype: tl.constexpr = tl.float16 if KIND >= 3 and dtype == tl.bfloat16 else dtype
    low = low.to(key_dtype)
    sums_low, highs, sums_high, out_high, rest_low, rest_high = low, low, low, low, low, low  # if they are not used
    lows = tl.broadcast_to(low[None, :, :], [WARPS, STORED, ROWS])
    # What codes have on top where that is taken from sums.
    TOP: tl.constexpr = 0.0 if KIND != 1 and KIND != 2 else 1024.0 if key_dtype == tl.float16 else 128.0
    if KIND == 1 or KIND == 2:
        sums_low = tl.sum(low.to(tl.float32), 0)[None, None, :]
    if KIND == 2:
        high = tl.load(place + STORED, mine[None, :], other=0.0)
        highs = tl.broadcast_to(high[None, :, :], [WARPS, STORED, ROWS])
        sums_high = tl.sum(high.to(tl.float32), 0)[None, None, :]
        out_high = tl.zeros([WARPS, STORED, ROWS], tl.float32)
        rest_low, rest_high = tl.zeros([WARPS, ROWS], tl.float32), tl.zeros([WARPS, ROWS], tl.float32)
    warp = tl.arange(0, WARPS)
    peak = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    if SINKS:  # one more key, without a value, of the first part
        sink = tl.load(sinks + head, mine, other=0.0) * 1.4426950408889634
        only = (warp == 0)[:, None] & (s == 0)
        peak = tl.where(only, sink[None, :], peak)
        total = tl.where(only, 1.0, total)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head, mine, other=0.0)[None, None, :]
    out_low = tl.zeros([WARPS, STORED, ROWS], tl.float32)
    base = g.to(tl.int64) * slots
    k += base * STORED
    v += base * STORED
    beside = warp[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        n = at + beside
        key = tl.minimum(n, end - 1)  # there are no others: they are read and do not count
        block = tl.load(table + b * blocks + key // BLOCK)
        slot = block.to(tl.int64) * BLOCK + key % BLOCK
        spot = slot[:, :, None] * STORED + wide[None, None, :]
        codes = tl.load(k + spot)
        scores = _scores(lows, highs, sums_low, sums_high, codes, k_scale, k_least, base + slot, KIND, TOP, ASSEMBLY)
        scores, unit = changed(scores, n[:, :, None], length, slope, scale, cap, CAPPED, SLOPES)
        visible = n[:, :, None] <= tl.minimum(position, end - 1)[None, None, :]
        if WINDOWED:
            visible = visible & (n[:, :, None] >= oldest[None, None, :])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * unit)
        top = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has not seen any key
        shrink = tl.exp2(peak - top)
        weights = tl.exp2(scores * unit - top[:, None, :])
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        codes = tl.load(v + slot[:, None, :] * STORED + wide[None, :, None])
        out_low, out_high, rest_low, rest_high = _add_values(
            weights, out_low, out_high, rest_low, rest_high, codes, shrink, v_scale, v_least, base + slot, KIND,
            value_dtype, ASSEMBLY,
        )  # fmt: skip
    # The warps' sums, by the largest score of all.
    whole = tl.max(peak, 0)
    factor = tl.exp2(peak - tl.where(whole == float("-inf"), 0.0, whole)[None, :])
    total = tl.sum(total * factor, 0)
    if KIND == 2:
        out_low += rest_low[:, None, :]
        out_high = tl.sum((out_high + rest_high[:, None, :]) * factor[:, None, :], 0)
    out_low = tl.sum(out_low * factor[:, None, :], 0)
    line = (start + query).to(tl.int64) * (groups * repeat) + head
    leave(out, acc, stats, out_low, out_high, whole, total, line, wide[:, None], mine, mine[None, :], splits, 0, SPLIT,
          KIND == 2, STORED)  # fmt: skip


def own_keys(rows: int, kind: str, stored: int, width: int, group: int, slots: int) -> bool:
    """Whether :func:`_attend_few` computes it, and does so faster: few rows, stored rows of a power of two that
    registers hold; scales as words of two. ``rows``: query heads of a key head's new tokens; ``kind`` of the pool;
    ``stored``: numbers or bytes of a stored row, of a head with ``width`` numbers, of which ``group`` share a scale;
    ``slots``: tokens that the pool holds."""
    if kind not in OWN or rows > ROWS or stored & (stored - 1) or not 16 <= stored <= 128:
        return False
    return slots % 2 == 0 if kind == "int8" else width == 2 * group if kind == "int4" else True
