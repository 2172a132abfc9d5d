"""Matrix-multiplication time: output tiles run in waves over the processors, bounded by the memory hierarchy.

For every tile shape and every split of k the kernel takes

    latency + (compute^p + memory^p)^(1/p) + fill + merging of splits,

where compute is waves × one tile's time and memory is the traffic over the bandwidth that the busy processors can draw;
the library is assumed to choose the best combination. A tile's time is that of its products or of loading its operands
from the cache: a tile of h × w loads (h + w) operands for h·w products, so small ones wait for the cache. Tile and wave
quantization: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), chapter 3; split k and stream-k:
Osama et al. 2023 (arXiv:2301.03598). Sizes are in elements, times in seconds.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ridgeline.predict.machine import Machine
from ridgeline.predict.operators.systolic import array_seconds, feed_seconds
from ridgeline.predict.operators.unrolled import product_seconds
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.efficiency import GemmConstants

_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (16, 64), (16, 128),
)  # fmt: skip
"""(rows, columns) of the output tiles that libraries are built with."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_K_STEP = 64
_LEAST_K = 256
"""Minimum number of elements of k per split."""
_FILL = 2.5e-7
"""Seconds to fill a tile's pipeline."""
_MERGE = 2e-6
"""Seconds to sum the parts of a split k."""
_OVERLAP = 3.5
"""Exponent p of ``(compute^p + memory^p)^(1/p)``."""
_STORE = 15.0
"""Bytes per clock at which one processor writes a finished tile."""
_DRAW = 64.0
"""Bytes per clock that one processor can draw from the cache or memory."""


class GemmTime(NamedTuple):
    """Seconds of one kernel and what bounds it: compute, memory or launch."""

    seconds: float
    bound: str


def constants(m: Machine, dtype: str) -> GemmConstants:
    """The constants for operands of ``dtype``: 16-bit, 8-bit or wider, if each was fitted."""
    table = m.efficiency.gemm
    if dtype in ("fp8", "int8", "int4"):
        return table.get("fp8") or table["bf16"]
    if dtype in ("fp32", "tf32", "fp64"):
        return table.get("fp32") or table["bf16"]
    return table["bf16"]


@lru_cache(maxsize=65536)
def gemm_time(
    m: Machine, dtype: str, rows: int, columns: int, k: int, groups: float, traffic: float, stored: float = 0,
    reuse: float = 0.0,
) -> GemmTime:  # fmt: skip
    """One kernel that multiplies ``groups`` independent pairs; ``rows`` is the total over all groups.

    ``traffic``: bytes read and written; ``stored``: bytes of one stored weight that is expanded on the fly; 0: weights
    are of ``dtype``; ``reuse``: bytes of weights accessed between two uses of one; 0: more than a cache holds.
    """
    return tiled(m, constants(m, dtype), dtype, rows, columns, k, groups, traffic, stored, reuse)


def tiled(
    m: Machine, c: GemmConstants, dtype: str, rows: int, columns: int, k: int, groups: float = 1.0,
    traffic: float = 0.0, stored: float = 0.0, reuse: float = 0.0,
) -> GemmTime:  # fmt: skip
    """As :func:`gemm_time`, with given constants and no caching."""
    units, slow, p = m.units, m.slow, _OVERLAP
    width = DTYPE_BYTES[dtype]
    each = max(1.0, rows / groups)
    read, written = rows * k * width, rows * columns * max(width, 2.0)
    weights = max(0.0, traffic - read - written) if traffic else groups * columns * k * width
    memory = _memory(m, c, read, written, weights, reuse)
    latency, peak = slow * c.latency, m.peak(dtype)
    if c.engine == "unrolled":
        busy = product_seconds(c, peak, each, groups, columns, k)
        if c.row_latency:
            memory += (each - 1) * weights / (m.bandwidth * c.memory_share)
        return bounded(latency, max(busy, memory), busy, memory)
    if each <= c.vector_rows and groups == 1 and not stored and k > _K_STEP:  # below, results bound both kernels
        results = rows * columns * c.vector_clocks / (m.clock * units)
        return bounded(latency, overlapped(results, memory, p) + slow * _FILL, results, memory)
    if c.engine == "systolic" and m.device.chip is not None:
        busy = max(array_seconds(m.device.chip, dtype, each, groups, columns, k) / c.share,
                   feed_seconds(m.device.chip, dtype, rows, columns, k))  # fmt: skip
        return bounded(latency, overlapped(busy, memory, p), busy, memory)
    unit_rate = peak / units * _share(m, c, peak) * (c.dequantize_share if stored else 1.0)
    load_rate = c.load_bytes_per_clock * m.clock / width
    store = _STORE * c.port * m.clock
    moved, draw = read + written + weights, _DRAW * c.port * m.clock
    partial = 8.0 * rows * columns / m.l2_bandwidth  # fp32, written and read
    best, best_compute, best_memory = 1e30, 0.0, 0.0
    for height, wide in _TILES if c.tile_rows == c.tile_columns == 1.0 else _scaled_tiles(c):
        if height > ceil(16 * c.tile_rows) and height >= 2 * each:  # the smallest are always tried
            continue
        tiles = groups * ceil(each / height) * ceil(columns / wide)
        math_k, load_k = 2.0 * height * wide / unit_rate, (height + wide) / load_rate
        per_k = math.sqrt(math.sqrt(math_k**4 + load_k**4))
        finish = 2.0 * height * wide / store
        for split in _SPLITS:
            blocks = tiles * split
            if split > 1 and (blocks > 2.1 * units or k < split * _LEAST_K):
                break
            waves = blocks / units
            waves = waves + c.wave * (ceil(waves) - waves) if waves > 1 else 1.0
            deep = ceil(k / (split * _K_STEP)) * _K_STEP
            compute = waves * max(deep * per_k, finish) + finish if c.hidden_store else waves * (deep * per_k + finish)
            drawn = max(memory, moved / (min(blocks, units) * draw))
            t = overlapped(compute, drawn, p) + slow * _FILL * min(waves, 2.0)
            if split > 1:
                t += slow * _MERGE + split * partial
            if t < best:
                best, best_compute, best_memory = t, compute, drawn
    return bounded(latency, best, best_compute, best_memory)


@lru_cache
def _scaled_tiles(c: GemmConstants) -> tuple[tuple[int, int], ...]:
    return tuple((ceil(height * c.tile_rows), ceil(wide * c.tile_columns)) for height, wide in _TILES)


def _memory(m: Machine, c: GemmConstants, read: float, written: float, weights: float, reuse: float) -> float:
    """Seconds of all traffic at full bandwidth: uncached traffic from memory, all of it through the cache.

    Activations come from the cache if they fit together with the weights and twice the results, which are evicted late;
    weights if those accessed between two of their uses fit, too.
    """
    passing = read + 2.0 * written
    far = (read + written) * (1.0 - m.resident(passing + weights))
    far += weights * (1.0 - m.resident(passing + max(reuse, weights)) if reuse else 1.0)
    return max(far / (m.bandwidth * c.memory_share), (read + written + weights) / m.l2_bandwidth)


def overlapped(a: float, b: float, p: float) -> float:
    """``(a^p + b^p)^(1/p)``."""
    high, low = (a, b) if a > b else (b, a)
    return float(high * (1.0 + (low / high) ** p) ** (1.0 / p))


def bounded(latency: float, seconds: float, compute: float, memory: float) -> GemmTime:
    """A kernel of ``seconds`` after its ``latency``, and which of its parts bounds it."""
    bound = "launch" if latency > max(compute, memory) else "compute" if compute >= memory else "memory"
    return GemmTime(latency + seconds, bound)


def _share(m: Machine, c: GemmConstants, peak: float) -> float:
    watts = m.device.watts
    if not c.power or not watts:
        return c.share
    return min(max(c.share, c.share_limit), c.share * math.sqrt(watts / peak / c.power))


def lasting_clock(m: Machine) -> float:
    """The clock that the power limit leaves the tensor cores, relative to the device that the constants are of."""
    c = constants(m, "bf16")
    return _share(m, c, m.peak("bf16")) / c.share


def quantize_time(m: Machine, c: GemmConstants, elements: float) -> float:
    """Seconds to scale a 16-bit tensor to 8 bits by its own largest value: one read for the maximum, one read, one
    write."""
    near = m.resident(4.0 * elements)
    each = near / m.l2_bandwidth + (1.0 - near) / (m.bandwidth * c.quantize_share)
    return m.slow * c.quantize_latency + 5.0 * elements * each
