"""A device as used by the time models: its datasheet and the constants that apply to it, looked up once."""

from __future__ import annotations

from ridgeline import catalog
from ridgeline.spec.device import Device
from ridgeline.spec.efficiency import Efficiency

_FALLBACK_CLOCK = 1.5e9
_LANE_FLOPS, _TENSOR_FLOPS = 256.0, 1024.0
"""FLOP per clock of one processor, for devices whose file does not say how many they have: in fp32 128 on A100, V100
and T4, 256 on every other GPU of the catalog; without an fp32 peak those of 16-bit products, 512 to 8192."""
_EDGE = 0.15
"""Fraction of a cache's size by which a cyclic working set may exceed it before hits drop to zero."""


class Machine:
    """Datasheet figures of one device (SI units) and its :class:`Efficiency`."""

    __slots__ = (
        "_peak_of",
        "bandwidth",
        "clock",
        "device",
        "efficiency",
        "fitted",
        "host",
        "l2",
        "l2_bandwidth",
        "peaks",
        "slow",
        "source",
        "units",
    )

    def __init__(self, device: Device, efficiency: Efficiency | None = None) -> None:
        self.device = device
        self.efficiency = efficiency or device.efficiency or catalog.efficiency(device)
        self.peaks = device.peak_flops
        self._peak_of: dict[str, float] = {}
        self.bandwidth = device.memory_bandwidth
        self.l2 = device.l2_bytes * self.efficiency.l2_share
        """Bytes that stay in the last-level cache between kernels."""
        self.l2_bandwidth = self.bandwidth * self.efficiency.l2_gain
        self.clock = device.clock or _FALLBACK_CLOCK
        self.units = device.sm_count or self._processors()
        self.slow = self.efficiency.clock / self.clock if self.efficiency.clock else 1.0
        """Factor on the seconds in ``efficiency``: latencies are measured in cycles, so they shrink as the clock
        rises."""
        calibrated = device.efficiency is not None and device.chip is None  # a design's constants are scaled ones
        self.fitted = calibrated or device.name in self.efficiency.fitted_on
        self.source = self.efficiency.source if self.fitted else "class default"

    def _processors(self) -> int:
        """How many processors the peaks amount to."""
        fp32 = self.peaks.get("fp32")
        return max(1, round((fp32 / _LANE_FLOPS if fp32 else self.peak("bf16") / _TENSOR_FLOPS) / self.clock))

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s of ``dtype``; without dedicated units it runs at the rate of the next wider dtype."""
        found = self._peak_of.get(dtype)
        if found is None:
            wider = (self.peaks[name] for name in _WIDER.get(dtype, (dtype, "fp32")) if name in self.peaks)
            found = self._peak_of[dtype] = next(wider, max(self.peaks.values()))
        return found

    def resident(self, size: float) -> float:
        """Fraction of ``size`` bytes, used repeatedly, that the last-level cache still holds."""
        if not self.l2:
            return 0.0
        return min(1.0, max(0.0, 1.0 - (size / self.l2 - 1.0) / _EDGE))

    def spread(self, kind: str) -> float:
        """Relative 68 % error of estimates of this kind."""
        e = self.efficiency
        return e.spread.get(kind, 0.15) if self.fitted else e.class_spread.get(kind, 0.3)


_WIDER = {
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "bf16", "fp16", "fp32"),
    "int4": ("int4", "int8", "bf16", "fp16", "fp32"),
    "nf4": ("int4", "int8", "bf16", "fp16", "fp32"),
    "ternary": ("int4", "int8", "bf16", "fp16", "fp32"),
    "binary": ("int4", "int8", "bf16", "fp16", "fp32"),
}

_RECENT = 16
_recent: list[Machine] = []


def machine(device: Device) -> Machine:
    """The :class:`Machine` of ``device``, cached for the devices in use."""
    for known in _recent:
        if known.device is device:
            return known
    _recent.insert(0, Machine(device))
    del _recent[_RECENT:]
    return _recent[0]
