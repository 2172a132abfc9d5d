"""Fused-attention time: prefill in blocks of queries, decode in splits of the cache.

Prefill (FlashAttention-2, arXiv:2307.08691): a block of 128 queries processes the keys it may see in tiles of 128; the
masked half of a causal product is skipped. Decode (flash-decoding): each thread block reads a range of one sequence's
keys and values for all query heads that share them; the ranges are split until all processors are busy. TensorRT-LLM's
decode kernels share key heads among at most 32 query heads (XQA); beyond that, and without sharing, every query head
reads its own (MMHA). The query heads and tokens of one key head are rows of a tile of fixed height, all of which the
tensor cores multiply: where their peak is low for the memory's bandwidth, as on an H20, that takes the time.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ridgeline.graph.graph import LATENT, NARROW
from ridgeline.predict.machine import Machine
from ridgeline.predict.operators.gemm import GemmTime, bounded, constants, gemm_time, lasting_clock, overlapped
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.efficiency import DecodeConstants, PrefillConstants

_BLOCK = 128.0
_TAIL = 0.5
"""Fraction of the longest block's time during which the other processors are idle."""
_MERGE = 1e-5
"""Seconds to merge results where the keys of one block of queries are divided among processors."""
_OVERLAP, _DECODE_OVERLAP = 1.2, 2.0
"""Exponent p of ``(compute^p + memory^p)^(1/p)``."""
_MEMORY_SHARE = 0.85
"""Fraction of the memory bandwidth that a prefill reaches."""
_NARROW_ROWS = 16
"""Rows of a tile in kernels with few: those of ``mma.sync``, which ours are made of."""
_LATENT_ROWS = 64
"""Rows of a tile in kernels whose values are their keys: ``BLOCK_SIZE_M`` of deepseek-ai/FlashMLA, and of
FlashAttention-3 for values of 512."""
_PACKED_SHARE = 0.88
"""Fraction of the tensor peak at which a decode multiplies such tiles, as a prefill does."""
_APART_SHARE = 0.15
"""The same for a kernel in which every query head is computed separately, on the vector units."""
_CHUNK = 128
"""Minimum number of keys per split in decode."""
_WAVE = 0.5
"""Fraction of a partly filled last wave that is lost in decode: blocks differ in length."""
_SHARED_HEADS = 32
_FEW_QUERIES = 16


def is_decode(q_len: int, kv_len: int) -> bool:
    """Whether a few new queries attend to a longer cache."""
    return q_len < kv_len and q_len <= _FEW_QUERIES


def decode_kernel(library: str, heads: int, kv_heads: int) -> str:
    """Name of the decode kernel that ``library`` selects: flash, xqa or mmha."""
    if library != "trtllm":
        return "flash"
    return "xqa" if 1 < heads // kv_heads <= _SHARED_HEADS else "mmha"


@lru_cache(maxsize=65536)
def attention_time(
    m: Machine, library: str, shape: tuple[int, ...], causal: bool, dtype: str, kv_dtype: str, backward: bool,
    reuse: float = 0.0,
) -> GemmTime:  # fmt: skip
    """One fused kernel over ``shape`` = (batch, heads, kv_heads, q_len, kv_len, head_dim).

    ``reuse``: bytes accessed between two uses of a decode's keys and values; 0: more than a cache holds.
    """
    if constants(m, dtype).engine == "unrolled":
        return _unrolled(m, shape, causal, dtype, backward)
    _, heads, kv_heads, q_len, kv_len, _ = shape
    kv = kv_dtype or dtype
    narrow = DTYPE_BYTES[kv] < 2
    if is_decode(q_len, kv_len) and not backward:
        kernel = decode_kernel(library, heads, kv_heads)
        decode_table = m.efficiency.decode
        name = kernel if kernel in decode_table else "flash"
        chosen = decode_table.get(f"{name}.fp8") if narrow else None
        c, each = chosen or decode_table[name], DTYPE_BYTES[kv]
        if library == NARROW:
            c = _narrow(c)
        if library == LATENT:  # values that are the keys are not read again
            c, each = _latent(c), 0.5 * each
        return decode(m, c, shape, each, kernel == "mmha", kv if c.narrow else dtype, reuse)
    table = m.efficiency.prefill
    name = library if library in table else "flash"
    given = table.get(f"{name}.fp8") if narrow else None
    return prefill(m, given or table[name], shape, causal, dtype, backward)


@lru_cache
def _narrow(c: DecodeConstants) -> DecodeConstants:
    """The constants of a kernel with tiles of few rows."""
    return c.model_copy(update={"rows": min(c.rows, _NARROW_ROWS)})


@lru_cache
def _latent(c: DecodeConstants) -> DecodeConstants:
    """The constants of a kernel whose values are its keys, which it converts to 16 bits where they are narrower."""
    return c.model_copy(update={"rows": min(c.rows, _LATENT_ROWS), "narrow": False})


def _unrolled(m: Machine, shape: tuple[int, ...], causal: bool, dtype: str, backward: bool) -> GemmTime:
    """Scores and values as two products of every head, as far as the mask lets queries see keys: the array knows no
    fused kernel."""
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    keys = ceil(kv_len - q_len + (q_len + 1) / 2) if causal else kv_len
    streams, width = batch * heads, DTYPE_BYTES[dtype]
    cached = batch * kv_heads * kv_len * dim * width
    rows = streams * q_len
    moved = rows * (keys + dim) * width + cached
    scores = gemm_time(m, dtype, rows, keys, dim, streams, moved)
    values = gemm_time(m, dtype, rows, dim, keys, streams, moved)
    factor = 2.5 if backward else 1.0
    return GemmTime(factor * (scores.seconds + values.seconds), max(scores, values).bound)


def prefill(
    m: Machine, c: PrefillConstants, shape: tuple[int, ...], causal: bool, dtype: str = "bf16", backward: bool = False
) -> GemmTime:
    """Attention of many queries: seconds of the forward kernel, or of the backward one."""
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    rows, streams = (1, kv_heads) if q_len == 1 and c.pack else (q_len, heads)
    width = _BLOCK if rows > 64 else 64.0
    count = ceil(rows / width)
    narrow = c.narrow == "cache" or (c.narrow == "queries" and DTYPE_BYTES[dtype] < 2)
    factor = 2.5 / c.backward_share if backward else 1.0  # five products in backward, two in forward
    rate = m.peak("fp8" if narrow else _math(dtype)) / m.units
    area = width * _BLOCK
    softmax = c.softmax_clocks * area / (_BLOCK * _BLOCK)
    if c.tensor_rate:
        softmax *= min(1.0, c.tensor_rate * m.clock / rate)
    lasting = lasting_clock(m)
    products = 4.0 * area * dim / (rate * c.tensor_share * lasting) * factor
    exponentials = (2.0 if backward else 1.0) * softmax / m.clock
    if not c.asynchronous:
        tile = products + exponentials / lasting
    else:  # while the tensor cores wait, which draw the power, nothing slows the exponentials
        tile = products + exponentials if backward else max(products, exponentials)
    if causal:  # block i of n sees everything before it and itself
        before = max(0, kv_len - q_len) / _BLOCK
        longest = before + count * width / _BLOCK
        mean = before + 0.5 * (count + 1) * width / _BLOCK
    else:
        longest = mean = kv_len / _BLOCK
    fixed = m.slow * c.block * factor
    blocks = batch * streams * count
    longest_seconds = max(longest, 0.5) * tile
    share = blocks * (mean * tile + fixed) / m.units
    compute = 1e30
    for split in (1, 2, 4):
        filled = blocks * split / m.units
        if split > 1 and (filled > 2 or longest_seconds / split < 2 * tile):
            break
        alone = longest_seconds / split
        t = (share + _TAIL * alone if filled > 1 else alone) + fixed + (m.slow * _MERGE if split > 1 else 0.0)
        compute = min(compute, t)
    element = max(2.0, DTYPE_BYTES[dtype])
    queries, keys = batch * q_len * heads * dim * element, batch * kv_len * kv_heads * dim * element
    moved = c.query_passes * queries + c.kv_passes * keys
    near = m.resident(2.0 * (queries + keys))  # the previous kernel wrote them, this one writes the same amount
    each = near / m.l2_bandwidth + (1.0 - near) / (m.bandwidth * _MEMORY_SHARE)
    memory = (2.0 if backward else 1.0) * moved * each
    return bounded(m.slow * c.latency, overlapped(compute, memory, _OVERLAP), compute, memory)


def decode(
    m: Machine, c: DecodeConstants, shape: tuple[int, ...], kv_bytes: float, apart: bool = False, dtype: str = "bf16",
    reuse: float = 0.0,
) -> GemmTime:  # fmt: skip
    """Attention of few queries over a cache of ``kv_bytes`` per element; ``apart``: each query head reads its own keys
    and values."""
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    per_key = 2.0 * dim * kv_bytes
    traffic = batch * kv_heads * max(kv_len, c.tile) * per_key + 4.0 * batch * heads * q_len * dim
    near = m.resident(reuse) if reuse else 0.0
    bandwidth = m.bandwidth * c.memory_share
    memory = traffic * (near / m.l2_bandwidth + (1.0 - near) / bandwidth)
    if apart:  # from the cache, where the first query head left it
        memory += batch * (heads - kv_heads) * kv_len * per_key / m.l2_bandwidth
    streams = batch * (heads if apart else kv_heads)
    packed = kv_heads * c.rows * ceil(heads // kv_heads * q_len / c.rows)
    rows, share = (heads * q_len, _APART_SHARE) if apart else (packed, _PACKED_SHARE)
    math = 4.0 * batch * rows * kv_len * dim / (m.peak(dtype if c.narrow else _math(dtype)) * share)
    slots = m.units * c.slots
    one_draws = c.draw_bytes_per_clock * m.clock
    p, slow = _DECODE_OVERLAP, m.slow
    best, best_block = 1e30, 0.0
    split = 1
    while True:
        waves = streams * split / slots
        waves = waves + _WAVE * (ceil(waves) - waves) if waves > 1 else 1.0
        block = waves * (slow * c.block + max(kv_len / split, 16.0) * per_key / one_draws)
        t = max(overlapped(memory, block, p), math)
        if split > 1:
            t += slow * c.split + split * batch * heads * dim * 8.0 / m.l2_bandwidth
        if t < best:
            best, best_block = t, block
        split *= 2
        if c.splits == "never" or (c.splits == "shared" and heads == kv_heads):
            break
        if kv_len < split * _CHUNK or streams * split > 4 * slots:
            break
    latency = slow * c.latency
    if heads > kv_heads:
        latency += slow * (c.pack + (c.transpose if batch > 1 and kv_heads > 1 else 0.0))
    return bounded(latency, best, math, max(memory, best_block))


def _math(dtype: str) -> str:
    """Products run in 16 bits where operands are narrower; the gain of 8-bit kernels is in their constants."""
    return "bf16" if DTYPE_BYTES[dtype] < 2 else dtype
