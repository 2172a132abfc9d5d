"""Attention of a step's new tokens over a paged pool in Triton, for CUDA devices (vLLM's paged attention,
arXiv:2309.06180; keys split over programs and merged as in flash decoding).

The pool holds keys and values as [G, slots, D], plain or as codes (:mod:`ridgeline.nn.quant.quantized_kv`); a
sequence's table names its blocks of slots. Query heads that share a key head, of all new tokens of a sequence, are rows
of one product on tensor cores: single tokens, drafts and chunks of prompts run in the same kernel, few rows over codes
in one of their own (:mod:`.paged_decode`). Few rows are split over programs by each sequence's own length. Scores and
sums are fp32. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.e4m3 import widened
from ridgeline.nn.kernels.early import wait
from ridgeline.nn.kernels.paged_decode import EACH, ROWS, STAGES, WARPS, _attend_few, own_keys
from ridgeline.nn.kernels.paged_rows import changed, leave, rows_and_keys
from ridgeline.nn.kernels.quick import Quick, blocks, power, quick
from ridgeline.nn.kernels.target import capability
from ridgeline.nn.memory.step_pages import Pages
from ridgeline.nn.model.mask import ScoreChanges
from ridgeline.nn.quant.quantized_kv import ByteCodes, Codes, NibbleCodes

TILE = 64
"""Keys of one step of a program."""
LEAST = 64
"""Keys of a part at least."""
PROMPT_STAGES = 5
"""By which the next tile is on its way while one is multiplied: blocks are asked for another tile ahead. One less on
Blackwell, where registers would be spilled."""
_KINDS = {"plain": 0, "int8": 1, "int4": 2, "fp8": 3, "native fp8": 4}


@triton.jit
def _loaded(place, mask, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored numbers in ``dtype``: plain, codes of int8, or of fp8 (e4m3), for which processors before 8.9 have no
    instruction."""
    x = tl.load(place, mask, other=0)
    if KIND == 3:
        return widened(x, dtype)
    elif KIND == 4:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _nibbles(codes, HALF: tl.constexpr, dtype: tl.constexpr):
    """128 + the low or high (``HALF`` 1) nibbles of bytes: bits of a mantissa, so that nothing is converted."""
    nibbles = (codes.to(tl.int16) >> (4 * HALF)) & 15
    if dtype == tl.float16:
        return ((nibbles << 3) | 0x5800).to(tl.float16, bitcast=True)
    return (nibbles | 0x4300).to(tl.bfloat16, bitcast=True).to(dtype)


@triton.jit
def _group_scales(scale, slot, wide, there, inside, HALF: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr):
    """Of one half of a head: [TILE] where that lies in one group, else of each number, [TILE, PADDED]."""
    GROUPS: tl.constexpr = 2 * STORED // GROUP
    EACH: tl.constexpr = STORED // GROUP
    if GROUP < STORED and wide.shape[0] == STORED:  # powers of two
        at = slot[:, None] * GROUPS + HALF * EACH + tl.arange(0, EACH)[None, :]
        some = tl.load(scale + at, there[:, None], other=0.0).to(tl.float32)
        return tl.reshape(tl.broadcast_to(some[:, :, None], [slot.shape[0], EACH, GROUP]), [slot.shape[0], STORED])
    elif GROUP < STORED:
        at = slot[:, None] * GROUPS + ((HALF * STORED + wide) // GROUP)[None, :]
        return tl.load(scale + at, there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    else:
        return tl.load(scale + slot * GROUPS + HALF * STORED // GROUP, there, other=0.0).to(tl.float32)


@triton.jit
def _half_scores(query, sums, codes, scale, least, slot, wide, there, inside, HALF: tl.constexpr, STORED: tl.constexpr,
                 GROUP: tl.constexpr):  # fmt: skip
    """Products of one half of the queries [ROWS, PADDED], whose sums are ``sums`` [ROWS], with keys in nibbles."""
    keys = _nibbles(codes, HALF, query.dtype)
    scales = _group_scales(scale, slot, wide, there, inside, HALF, STORED, GROUP)
    lows = _group_scales(least, slot, wide, there, inside, HALF, STORED, GROUP)
    if GROUP < STORED:
        keys = ((keys.to(tl.float32) - 128.0) * scales + lows).to(query.dtype)
        return tl.dot(query, tl.trans(keys), input_precision="ieee")
    else:
        found = tl.dot(query, tl.trans(keys), input_precision="ieee") * scales[None, :]
        return found + sums[:, None] * (lows - 128.0 * scales)[None, :]


@triton.jit
def _half_values(weights, out, rest, codes, scale, least, slot, wide, there, inside, HALF: tl.constexpr,
                 STORED: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Add values in nibbles to ``out`` [ROWS, PADDED] and to ``rest`` [ROWS], which belongs to each of its columns."""
    values = _nibbles(codes, HALF, dtype)
    scales = _group_scales(scale, slot, wide, there, inside, HALF, STORED, GROUP)
    lows = _group_scales(least, slot, wide, there, inside, HALF, STORED, GROUP)
    if GROUP < STORED:
        values = ((values.to(tl.float32) - 128.0) * scales + lows).to(dtype)
        return tl.dot(weights.to(dtype), values, out, input_precision="ieee"), rest
    else:
        scaled = (weights * scales[None, :]).to(dtype)
        rest += tl.sum(weights * lows[None, :] - 128.0 * scaled.to(tl.float32), 1)
        return tl.dot(scaled, values, out, input_precision="ieee"), rest


@triton.jit
def _tile(low, high, sums_low, sums_high, peak, total, out_low, out_high, rest_low, rest_high, k, k_scale, k_least, v,
          v_scale, v_least, table, at, end, position, oldest, length, slope, scale, cap, MASKED: tl.constexpr,
          WINDOWED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
          BLOCK: tl.constexpr, STORED: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Add the keys from ``at`` on to what is known of a program's rows: the largest score, in units of the exponential
    of 2, sums of weights and of values, of the latter of both halves with a rest where they are nibbles."""
    n, wide = at + tl.arange(0, TILE), tl.arange(0, PADDED)
    there = n < end if MASKED else tl.full([TILE], True, tl.int1)  # which costs nothing
    inside = wide < STORED if PADDED > STORED else tl.full([PADDED], True, tl.int1)
    block = tl.load(table + n // BLOCK, there, other=0)
    slot = block.to(tl.int64) * BLOCK + n % BLOCK
    spot = slot[:, None] * STORED + wide[None, :]
    held = there[:, None] & inside[None, :]
    if KIND == 2:
        codes = tl.load(k + spot, held, other=0)
        scores = _half_scores(low, sums_low, codes, k_scale, k_least, slot, wide, there, inside, 0, STORED, GROUP)
        scores += _half_scores(high, sums_high, codes, k_scale, k_least, slot, wide, there, inside, 1, STORED, GROUP)
    else:
        keys = _loaded(k + spot, held, KIND, low.dtype)
        scores = tl.dot(low, tl.trans(keys), input_precision="ieee")
        if KIND == 1:
            scores *= tl.load(k_scale + slot, there, other=0.0).to(tl.float32)[None, :]
    scores, unit = changed(scores, n[None, :], length, slope, scale, cap, CAPPED, SLOPES)
    if MASKED:
        visible = (n[None, :] <= position[:, None]) & there[None, :]
        if WINDOWED:
            visible = visible & (n[None, :] >= oldest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * unit)
    top = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # of a row that has not seen any key
    shrink = tl.exp2(peak - top)
    weights = tl.exp2(scores * unit - top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    out_low = out_low * shrink[:, None]
    if KIND == 2:
        codes = tl.load(v + spot, held, other=0)
        out_low, rest_low = _half_values(weights, out_low, rest_low * shrink, codes, v_scale, v_least, slot, wide,
                                         there, inside, 0, STORED, GROUP, low.dtype)  # fmt: skip
        out_high, rest_high = _half_values(weights, out_high * shrink[:, None], rest_high * shrink, codes, v_scale,
                                           v_least, slot, wide, there, inside, 1, STORED, GROUP, low.dtype)  # fmt: skip
    else:
        values = _loaded(v + spot, held, KIND, low.dtype)
        if KIND == 1:
            weights *= tl.load(v_scale + slot, there, other=0.0).to(tl.float32)[None, :]
        out_low = tl.dot(weights.to(low.dtype), values, out_low, input_precision="ieee")
    return higher, total, out_low, out_high, rest_low, rest_high


@quick
@triton.jit
def _attend(q, k, k_scale, k_least, v, v_scale, v_least, out, acc, stats, work, table, lengths, starts, slopes, sinks,
            slots, blocks, groups, repeat, q_row, q_head, window, splits, scale, cap, KIND: tl.constexpr,
            GROUP: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
            SLOPES: tl.constexpr, SINKS: tl.constexpr, PROMPTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
            STORED: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
            LEAST: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """``ROWS`` rows of one sequence and one key head over one part of the keys that they see.

    ``STORED``: numbers in a stored row, half of a head's where two 4-bit codes share a byte; these are multiplied half
    by half.
    """
    g, s = tl.program_id(1), tl.program_id(2)
    b, length, start, query, head, mine, position, first, oldest, begin, end = rows_and_keys(
        work, table, lengths, starts, repeat, window, splits, CHUNKED, ROWS, TILE, LEAST, EARLY
    )
    # Of an empty sequence, which captured steps have in place of prompts that are not there. Over fp8, for which
    # registers would be spilled on Blackwell, such a program goes on and stores nothing.
    if not SPLIT and KIND < 3:  # noqa: SIM102 - known when it is compiled
        if begin >= end:
            return
    WIDTH: tl.constexpr = STORED * 2 if KIND == 2 else STORED
    wide = tl.arange(0, PADDED)
    inside = wide < STORED
    both = mine[:, None] & inside[None, :]
    place = q + (start + query).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + wide[None, :]
    low = tl.load(place, both, other=0.0)
    high, sums_low, sums_high, out_high, rest_low, rest_high, slope = low, low, low, low, low, low, low  # if not used
    if KIND == 2:
        high = tl.load(place + STORED, both, other=0.0)
        sums_low, sums_high = tl.sum(low.to(tl.float32), 1), tl.sum(high.to(tl.float32), 1)
        out_high = tl.zeros([ROWS, PADDED], tl.float32)
        rest_low, rest_high = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    if KIND >= 3 and low.dtype == tl.bfloat16:
        low = low.to(tl.float16)  # to which fp8 is converted in one instruction
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # one more key, without a value, in the first part
        sink = tl.load(sinks + head, mine, other=0.0) * 1.4426950408889634
        peak = tl.where(s == 0, sink, peak)
        total = tl.where(s == 0, 1.0, total)
    if SLOPES:
        slope = tl.load(slopes + head, mine, other=0.0)[:, None]
    out_low = tl.zeros([ROWS, PADDED], tl.float32)
    base = g.to(tl.int64) * slots
    k += base * STORED
    v += base * STORED
    if KIND == 1:
        k_scale += base
        v_scale += base
    if KIND == 2:
        k_scale += base * (WIDTH // GROUP)
        k_least += base * (WIDTH // GROUP)
        v_scale += base * (WIDTH // GROUP)
        v_least += base * (WIDTH // GROUP)
    # Keys that all rows see need no mask, but for the last tiles of prompts and all of windows.
    masked = begin
    if PROMPTS and not WINDOWED:
        masked = tl.maximum(begin, tl.minimum(end, first + 1) // TILE * TILE)
        for at in range(begin, masked, TILE):
            peak, total, out_low, out_high, rest_low, rest_high = _tile(
                low, high, sums_low, sums_high, peak, total, out_low, out_high, rest_low, rest_high, k, k_scale,
                k_least, v, v_scale, v_least, table + b * blocks, at, end, position, oldest, length, slope, scale, cap,
                False, WINDOWED, KIND, GROUP, CAPPED, SLOPES, BLOCK, STORED, PADDED, TILE,
            )  # fmt: skip
    for at in range(masked, end, TILE):
        peak, total, out_low, out_high, rest_low, rest_high = _tile(
            low, high, sums_low, sums_high, peak, total, out_low, out_high, rest_low, rest_high, k, k_scale, k_least,
            v, v_scale, v_least, table + b * blocks, at, end, position, oldest, length, slope, scale, cap,
            True, WINDOWED, KIND, GROUP, CAPPED, SLOPES, BLOCK, STORED, PADDED, TILE,
        )  # fmt: skip
    if KIND == 2:
        out_low += rest_low[:, None]
        out_high += rest_high[:, None]
    line = (start + query).to(tl.int64) * (groups * repeat) + head
    leave(out, acc, stats, out_low, out_high, peak, total, line, wide[None, :], mine, both, splits, 1, SPLIT, KIND == 2,
          STORED)  # fmt: skip


@quick
@triton.jit
def _merge(acc, stats, out, work, starts, repeat, groups, splits, WIDTH: tl.constexpr, PADDED: tl.constexpr,
           SPLITS: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    """Merge one row's parts, weighted by their fractions of the whole softmax sum."""
    wait(EARLY)
    b = tl.load(work + tl.program_id(0) * 2)
    row = tl.load(work + tl.program_id(0) * 2 + 1) + tl.program_id(2)
    start = tl.load(starts + b)
    query = row // repeat
    mine = query < tl.load(starts + b + 1) - start
    line = (start + query).to(tl.int64) * (groups * repeat) + tl.program_id(1) * repeat + row % repeat
    part, wide = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    there, inside = (part < splits) & mine, (wide < WIDTH) & mine
    peak = tl.load(stats + (line * splits + part) * 2, there, other=float("-inf"))
    total = tl.load(stats + (line * splits + part) * 2 + 1, there, other=0.0)
    top = tl.max(peak, 0)
    weight = tl.where(total > 0, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    place = (line * splits + part)[:, None] * WIDTH + wide[None, :]
    parts = tl.load(acc + place, (total > 0)[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + line * WIDTH + wide, merged.to(out.dtype.element_ty), inside)


@lru_cache(maxsize=8)
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _stored(store: Tensor | Codes, out: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """The kind of a store [1, G, slots, ·] (plain: its tensor), its numbers, scales and minima."""
    if isinstance(store, Tensor):
        return "plain", store, out, out
    if isinstance(store, ByteCodes):
        return "int8", store.codes, store.scale, out
    if isinstance(store, NibbleCodes):
        return "int4", store.codes, store.scale, store.least
    return "native fp8" if capability() >= 89 else "fp8", store.codes.view(torch.uint8), out, out


def paged_attention(
    q: Tensor, keys: Tensor | Codes, values: Tensor | Codes, given: Pages, window: int = 0,
    changes: ScoreChanges | None = None,
) -> Tensor:  # fmt: skip
    """Attention of ``q`` [T, H, D] (any strides but the last) over the pool, plain tensors or codes [1, G, slots, ·] →
    [T, H, D]. Keys and values of the new tokens are in the pool already.

    ``window``: newest tokens that a token sees, 0: all, negative: those of its chunk of -window.
    ``changes``: what happens to scores.
    """
    heads, width = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (kind, k, k_scale, k_least), (_, v, v_scale, v_least) = _stored(keys, out), _stored(values, out)
    groups, slots, stored = k.shape[1:]
    repeat, padded = heads // groups, max(16, power(stored))
    changes = changes or ScoreChanges(None, None, None)
    slopes = out if changes.slopes is None else _slopes(changes.slopes, q.device)
    sinks = out if changes.sinks is None else changes.sinks.float().contiguous()
    group = keys.group if isinstance(keys, NibbleCodes) else width
    for work in given.work:
        count = len(work.items)
        own = work.split and own_keys(work.used, kind, stored, width, group, slots)  # of each warp
        small = not work.split and width > (128 if capability() >= 90 and kind != "int4" else 64)
        tile = WARPS * EACH[kind] if own else TILE // 2 if q.dtype == torch.float32 or small else TILE
        longest = given.table.shape[1] * given.block
        least = max(1, LEAST // tile)
        splits = min(blocks(longest, least * tile), 2 * processors(q.device) // (count * groups))
        splits = max(1, splits) if work.split else 1
        acc, stats = (
            torch.empty((len(q), heads, splits, n) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
            for n in (width, 2)
        )
        scaled = [k_scale, k_least, v_scale, v_least]
        if own:
            scaled = [t.view(-1).view(torch.int32) if t.dtype == torch.float16 and t is not out else t for t in scaled]
        operands = (
            q, k, *scaled[:2], v, *scaled[2:], out, acc, stats, work.items, given.table, given.lengths, given.starts,
            slopes, sinks, slots, given.table.shape[1], groups, repeat, q.stride(0), q.stride(1), abs(window) or 2**30,
            splits, width**-0.5, changes.soft_cap or 1.0,
        )  # fmt: skip
        settings = {
            "KIND": _KINDS[kind], "WINDOWED": window != 0, "CHUNKED": window < 0,
            "CAPPED": changes.soft_cap is not None, "SLOPES": changes.slopes is not None,
            "SINKS": changes.sinks is not None, "SPLIT": splits > 1, "BLOCK": given.block, "STORED": stored,
            "ROWS": ROWS if own else work.rows, "LEAST": least,
        }  # fmt: skip
        if own:
            _attend_few[count, groups, splits](
                *operands, **settings, EACH=EACH[kind], WARPS=WARPS, STAGES=STAGES,
                ASSEMBLY=isinstance(_attend_few, Quick), num_warps=WARPS,
            )  # fmt: skip
        else:
            _attend[count, groups, splits](
                *operands, **settings, GROUP=group, PROMPTS=not work.split, PADDED=padded, TILE=tile,
                num_warps=4 if work.rows < 64 else 8,
                num_stages=3 if work.split else PROMPT_STAGES - (capability() >= 100),
            )  # fmt: skip
        if splits > 1:
            _merge[count, groups, work.used](
                acc, stats, out, work.items, given.starts, repeat, groups, splits, WIDTH=width,
                PADDED=power(width), SPLITS=power(splits),
            )  # fmt: skip
    return out
