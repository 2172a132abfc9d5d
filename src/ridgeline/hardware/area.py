"""Die area of a chip by block: transistor counts over the process's density, memory cells, and analog interfaces.

LLMCompass's model (arXiv:2312.03134, section 3.4): arithmetic units are floating-point units whose transistors grow as
the square of the mantissa's bits; static memory pays an efficiency by the size of its blocks; register files are a fit
of area at 90 nm scaled by density; control logic per lane and the crossbar per core were fitted on the GA100 and
Aldebaran dies. So it is within 10 % for chips like these, and off by factors for others: 128 × 128 arrays come out at
a third of their published area, and 128 MB of scratchpad at 2.7 times (TPU v4i).
"""

from __future__ import annotations

import math

from ridgeline.catalog import chips
from ridgeline.spec.chip import Chip, Process, Registers, Vector

RETICLE_MM2 = 858.0
"""Largest die that one exposure makes: 26 mm × 33 mm."""
SPREAD = 0.10
"""Relative error of areas of chips like those the constants were fitted on."""

_FPU64 = 685_300.0
_MANTISSA = {"fp64": 52, "fp32": 23, "fp16": 10, "bf16": 10}  # one unit computes both 16-bit formats
_INT32 = 177_690.0
_CONTROL = 996_200.0
"""Transistors of control logic per element of a lane's vector width."""
_CROSSBAR = 44.3e6
"""Transistors that connect one core to the global buffer."""
_EFFICIENCY = (0.076, 0.142, 0.247, 0.393, 0.559, 0.704, 0.526)
"""Share of a static memory's area that its cells take, for blocks of 4 KiB, 8 KiB … 256 KiB."""
_BLOCK_EFFICIENCY = 0.602
"""The same of 512 KiB, of which larger memories are built."""
_DENSITY_90NM = 1.6e6
"""Transistors per mm² of the 90 nm process that register files were fitted in."""


def transistors(dtype: str) -> float:
    """Transistors of one multiply-add unit."""
    return _FPU64 * (_MANTISSA[dtype] / 52) ** 2


def sram_mm2(size: float, p: Process) -> float:
    """Area of ``size`` bytes of static memory, in blocks of at most 512 KiB: at least that of a smaller block."""
    if size > 2**19:
        return math.ceil(size / 2**19) * 2**19 * 8 * p.sram_bit_mm2 / _BLOCK_EFFICIENCY
    size = max(size, 2**12)
    step = math.ceil(math.log2(size)) - 12
    shares = (*_EFFICIENCY, _BLOCK_EFFICIENCY)
    cells = max(size / shares[step], 2 ** (11 + step) / shares[step - 1] if step else 0.0)
    return cells * 8 * p.sram_bit_mm2


def registers_mm2(r: Registers, p: Process) -> float:
    """Area of a lane's register files: a quadratic fit in depth, width and ports at 90 nm, scaled by density."""
    d, w, n = r.depth, r.bits, r.ports
    square_microns = (
        3.29e4 - 1090 * d - 883 * w - 5550 * n + 53.5 * d * w + 0.015 * d**2 + 0.0108 * w**2 + 0.586 * n**2
        + 142 * d * n + 368 * w * n
    )  # fmt: skip
    return r.files * max(0.0, square_microns) / 1e6 * _DENSITY_90NM / p.density


def vector_mm2(v: Vector, p: Process) -> float:
    """Area of a lane's vector unit, without control."""
    units = v.int32 * _INT32 + sum(
        n * transistors(t) for t, n in (("fp16", v.fp16), ("fp32", v.fp32), ("fp64", v.fp64))
    )
    return units / p.density


def core_mm2(c: Chip) -> dict[str, float]:
    """Area of one core by block."""
    p, core = chips.process(c.process), c.core
    array = core.array.rows * core.array.columns * transistors(core.array.dtype) / p.density
    return {
        "control": core.lanes * core.vector.width * _CONTROL / p.density,
        "vector units": core.lanes * vector_mm2(core.vector, p),
        "arrays": core.lanes * array,
        "registers": core.lanes * registers_mm2(core.registers, p),
        "local buffer": sram_mm2(core.sram_bytes, p),
    }


def die_mm2(c: Chip) -> dict[str, float]:
    """Area of the die by block: cores (with spares), crossbar, global buffer, memory, links, other."""
    p, memory = chips.process(c.process), chips.interface(c.memory.kind)
    blocks = {
        "cores": c.die_cores * sum(core_mm2(c).values()),
        "crossbar": c.die_cores * _CROSSBAR / p.density,
        "global buffer": sram_mm2(c.die_cache, p),
        "memory PHY": c.memory.channels * memory.phy_mm2,
        "memory control": c.memory.channels * memory.controller_transistors / p.density,
    }
    if c.links is not None:
        link = chips.interface(c.links.kind)
        blocks["link PHY"] = c.links.count * link.phy_mm2
        blocks["link control"] = c.links.count * link.controller_transistors / p.density
    if c.other_mm2:
        blocks["other"] = c.other_mm2
    return blocks


def total_mm2(c: Chip) -> float:
    """Area of the whole die."""
    return sum(die_mm2(c).values())


def edge_mm(c: Chip) -> float:
    """Length of the die's edge that memory and links take."""
    taken = c.memory.channels * chips.interface(c.memory.kind).edge_mm
    return taken + (c.links.count * chips.interface(c.links.kind).edge_mm if c.links is not None else 0.0)


def shoreline_mm(area: float) -> float:
    """Edge of a square die of this area."""
    return 4.0 * math.sqrt(area)
