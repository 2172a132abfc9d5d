"""Operator time: roofline bound, corrected for tiles, waves, launch and measured rates.

``seconds = latency + max(flops / flop_rate, bytes / byte_rate)`` with the rates of, in this order: the device's
measured profile (``kind.direction.dtype``, then ``kind.dtype``), or class defaults applied to its datasheet.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ridgeline.graph.graph import Op
from ridgeline.spec.device import Device, Rate


class Timed(NamedTuple):
    """Seconds of one call, what bounds it (compute, memory, launch, link), and where the rate came from."""

    seconds: float
    bound: str
    source: str


# Share of the datasheet's peak that well-tuned kernels of each kind reach on large shapes. First-order class defaults;
# `probe` replaces them by measurements.
_COMPUTE_SHARE = {
    "gpu": {"gemm": 0.80, "bmm": 0.55, "attention": 0.55},
    "cpu": {"gemm": 0.70, "bmm": 0.40, "attention": 0.35},
}
_MEMORY_SHARE = {"gpu": 0.85, "cpu": 0.70}
_TILE = 128


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of ``dtype``; a dtype without units of its own runs at the fp32 rate."""
    return device.peak_flops.get(dtype) or device.peak_flops.get("fp32") or max(device.peak_flops.values())


def find_rate(device: Device, kind: str, direction: str, dtype: str) -> Rate | None:
    """The measured rate of a kind of operator, most specific key first; None when it was not measured."""
    rates = device.rates
    return rates.get(f"{kind}.{direction}.{dtype}") or rates.get(f"{kind}.{dtype}")


def wave_efficiency(m: int, n: int, units: int) -> float:
    """Share of useful work when an m × n output is cut into 128 × 128 tiles run in waves over ``units`` processors."""
    if not units or not m or not n:
        return 1.0
    tiles = -(-m // _TILE) * -(-n // _TILE)
    if tiles < units:  # split-K and smaller tiles recover some of a part-filled wave
        return max(0.5, tiles / units) * min(1.0, (m * n) / (tiles * _TILE * _TILE) + 0.5)
    waves = -(-tiles // units)
    return (m * n) / (_TILE * _TILE) / (waves * units)


def op_time(op: Op, device: Device) -> Timed:
    """Seconds of one call of ``op`` on ``device`` (compute operators; collectives are in ``collective.py``)."""
    rate = find_rate(device, op.kind, op.direction, op.dtype)
    if rate is not None:
        compute = op.flops / rate.flop_rate if rate.flop_rate else 0.0
        memory = op.bytes / rate.byte_rate if rate.byte_rate else 0.0
        return _bounded(rate.latency + device.extra_latency, compute, memory, rate.source)
    return _default(op, device)


@lru_cache(maxsize=65536)
def _gpu_share(kind: str, shape: tuple[int, ...], units: int) -> float:
    share = _COMPUTE_SHARE["gpu"].get(kind, 0.5)
    if kind == "gemm" and len(shape) == 3:
        m, n, k = shape
        share *= max(0.05, wave_efficiency(m, n, units)) * k / (k + 128.0)
    return share


def _default(op: Op, device: Device) -> Timed:
    peak = peak_flops(device, op.dtype)
    if device.kind == "gpu":
        share = _gpu_share(op.kind, op.shape, device.sm_count)
    else:
        share = _COMPUTE_SHARE["cpu"].get(op.kind, 0.3)
    compute = op.flops / (peak * share) if op.flops else 0.0
    memory = op.bytes / (device.memory_bandwidth * _MEMORY_SHARE[device.kind])
    return _bounded(device.launch_latency, compute, memory, "class default")


def _bounded(latency: float, compute: float, memory: float, source: str) -> Timed:
    slow = max(compute, memory)
    bound = "launch" if latency > slow else "compute" if compute >= memory else "memory"
    return Timed(latency + slow, bound, source)


def roof_seconds(op: Op, device: Device) -> float:
    """The least time the device's peak and bandwidth allow."""
    return max(op.flops / peak_flops(device, op.dtype), op.bytes / device.memory_bandwidth)
