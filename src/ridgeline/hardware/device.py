"""The device that a chip makes: for ``--on``, and for files that `ridgeline hardware` writes."""

from __future__ import annotations

from ridgeline.catalog import chips
from ridgeline.hardware.area import total_mm2
from ridgeline.hardware.constants import scaled_constants
from ridgeline.spec.chip import Chip
from ridgeline.spec.device import Device, Link

POWER_SPREAD = 0.40
"""Relative error of the power model."""
_LAUNCH, _RESERVED = 4e-6, 0.8e9
"""Seconds between kernels and bytes of framework context: assumed, as of the catalog's GPUs."""


def power(c: Chip) -> dict[str, float]:
    """Watts at full arithmetic, memory and link rates by part: arithmetic, memory, links, static. Within 40 %."""
    p = chips.process(c.process)
    parts = {
        "arithmetic": p.joules_per_flop * max(c.peak_flops.get(d, 0.0) for d in ("bf16", "fp16", "fp32")),
        "memory": 8 * chips.interface(c.memory.kind).joules_per_bit * c.memory.bandwidth,
        "links": 0.0,
        "static": p.static_watts_per_mm2 * total_mm2(c),
    }
    if c.links is not None:  # both directions
        parts["links"] = 16 * chips.interface(c.links.kind).joules_per_bit * c.links.count * c.links.bandwidth
    return parts


def energy(c: Chip) -> dict[str, float]:
    """Joules per operation: a 16-bit FLOP, a byte of memory, a byte over a link. Within 40 %, as the power."""
    found = {"16-bit FLOP": chips.process(c.process).joules_per_flop,
             "byte of memory": 8 * chips.interface(c.memory.kind).joules_per_bit}  # fmt: skip
    if c.links is not None:
        found["byte over a link"] = 8 * chips.interface(c.links.kind).joules_per_bit
    return found


def watts(c: Chip) -> float:
    """Rated power, or the power model's where none is given."""
    return c.watts or sum(power(c).values())


def chip_device(c: Chip) -> Device:
    """The device that a chip makes: its peaks, memory, buffers, links and power."""
    link = None
    if c.links is not None:
        link = Link(name=f"{c.links.count} x {c.links.kind}", bandwidth=c.links.count * c.links.bandwidth,
                    latency=c.links.latency, source="the design")  # fmt: skip
    return Device(
        name=c.name, title=c.title, architecture=c.architecture, peak_flops=c.peak_flops,
        memory_bytes=c.memory.bytes, memory_bandwidth=c.memory.bandwidth, l2_bytes=float(c.cache_bytes),
        sm_count=c.cores, clock=c.clock, launch_latency=_LAUNCH, reserved_bytes=_RESERVED, link=link, watts=watts(c),
        efficiency=scaled_constants(c), chip=c,
        source=f"derived from a design: {c.source}",
    )  # fmt: skip
