"""Matrix-multiplication time: output tiles run in waves over the processors, bounded by the memory behind them.

For every tile shape and every split of k the kernel takes

    latency + (compute^p + memory^p)^(1/p) + fill + merging of splits,

where compute is waves × one tile's time and memory is the traffic over the bandwidth that the busy processors can
draw; the library is taken to choose the best one. Tile and wave quantization: NVIDIA, Matrix Multiplication Background
User's Guide (DU-09799-001), chapter 3; split k and stream-k: Osama et al. 2023 (arXiv:2301.03598). Sizes are in
elements, times in seconds.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ridgeline.predict.machine import Machine
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.efficiency import GemmConstants

_TILES = (
    (256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2),
    (64, 64, 3), (64, 32, 4), (32, 64, 4), (16, 64, 4), (16, 128, 4),
)  # fmt: skip
"""(rows, columns, rank of efficiency) of the output tiles that libraries are built with."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_K_STEP = 64
_LEAST_K = 256
"""Fewest elements of k that are worth a split of their own."""


class GemmTime(NamedTuple):
    """Seconds of one kernel and what bounds it: compute, memory or launch."""

    seconds: float
    bound: str


def constants(m: Machine, dtype: str) -> GemmConstants:
    """The constants for operands of ``dtype``: 16-bit, 8-bit or wider, as far as each was fitted."""
    table = m.efficiency.gemm
    if dtype in ("fp8", "int8", "int4"):
        return table.get("fp8") or table["bf16"]
    if dtype in ("fp32", "tf32", "fp64"):
        return table.get("fp32") or table["bf16"]
    return table["bf16"]


@lru_cache(maxsize=65536)
def gemm_time(
    m: Machine, dtype: str, rows: int, columns: int, k: int, groups: float, traffic: float, stored: float = 0
) -> GemmTime:
    """One kernel that multiplies ``groups`` independent pairs, ``rows`` being those of all groups together.

    ``traffic``: bytes read and written; ``stored``: bytes of one stored weight that is expanded
    on the fly; 0: weights are of ``dtype``.
    """
    return tiled(m, constants(m, dtype), dtype, rows, columns, k, groups, traffic, stored)


def tiled(
    m: Machine,
    c: GemmConstants,
    dtype: str,
    rows: int,
    columns: int,
    k: int,
    groups: float = 1.0,
    traffic: float = 0.0,
    stored: float = 0.0,
) -> GemmTime:
    """As :func:`gemm_time`, with given constants and nothing remembered."""
    units, slow, p = m.units, m.slow, c.overlap
    width = DTYPE_BYTES[dtype]
    each = max(1.0, rows / groups)
    traffic = traffic or (rows * k + groups * columns * k) * width + rows * columns * max(width, 2)
    peak = m.peak(dtype)
    unit_rate = peak / units * _share(m, c, peak) * (c.dequantize_share if stored else 1.0)
    slower = min(1.0, peak / units / m.clock / c.tensor_rate) if c.tensor_rate else 1.0
    if stored:
        slower *= stored / width
    at_128 = 1.0 / c.tile_128
    at_64 = at_128 / c.tile_64
    at_square = at_64 / c.tile_square
    at_small = at_square / c.tile_small
    costs = (1.0, *(1.0 + (t - 1.0) * slower for t in (at_128, at_64, at_square, at_small)))
    bandwidth = m.bandwidth * c.memory_share
    l2 = c.l2_bytes_per_clock * m.clock * units
    store = c.store_bytes_per_clock * m.clock
    saturating = units * c.feed
    partial = 8.0 * rows * columns  # fp32, written and read
    best, best_compute, best_memory = 1e30, 0.0, 0.0
    for height, wide, rank in _TILES:
        if height > 16 and height >= 2 * each:
            continue
        tiles = groups * ceil(each / height) * ceil(columns / wide)
        per_k = 2.0 * height * wide * costs[rank] / unit_rate
        finish = 2.0 * height * wide / store
        for split in _SPLITS:
            blocks = tiles * split
            if split > 1 and (blocks > 2.1 * units or k < split * _LEAST_K):
                break
            waves = blocks / units
            waves = waves + c.wave * (ceil(waves) - waves) if waves > 1 else 1.0
            deep = ceil(k / (split * _K_STEP)) * _K_STEP
            compute = waves * (deep * per_k + finish)
            memory = traffic / bandwidth
            if blocks < saturating:
                memory *= saturating / blocks
            high, low = (compute, memory) if compute > memory else (memory, compute)
            t = high * (1.0 + (low / high) ** p) ** (1.0 / p) + slow * c.fill * min(waves, 2.0)
            if split > 1:
                t += slow * c.split + split * partial / l2
            if t < best:
                best, best_compute, best_memory = t, compute, memory
    latency = slow * (c.latency if each > 1 or groups > 1 else c.vector_latency)
    slowest = max(best_compute, best_memory)
    bound = "launch" if latency > slowest else "compute" if best_compute >= best_memory else "memory"
    return GemmTime(latency + best, bound)


def _share(m: Machine, c: GemmConstants, peak: float) -> float:
    watts = m.device.watts
    if not c.power or not watts:
        return c.share
    return min(max(c.share, c.share_limit), c.share * math.sqrt(watts / peak / c.power))


def quantize_time(m: Machine, c: GemmConstants, elements: float) -> float:
    """Seconds to scale a 16-bit tensor to 8 bits by its own largest value: read for it, read again, write."""
    return m.slow * c.quantize_latency + 5.0 * elements / (m.bandwidth * c.quantize_share)
