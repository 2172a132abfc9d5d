"""What a chip costs to make: its die, by wafer price and yield, and its memory, at dated prices.

Not counted, for want of public figures: packaging and interposer, test, masks and design, memory controllers beyond the
die, board. So these are costs of silicon to compare designs with, not prices of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ridgeline.catalog import chips
from ridgeline.hardware.area import core_mm2, die_mm2, total_mm2
from ridgeline.spec.chip import Chip, Prices, Process
from ridgeline.spec.errors import UserError, unknown

Yield = Literal["none", "plain", "spare"]
"""Dies that work: all; those without a defect; those with at most as many defective cores as there are spares."""
WAFER_MM = 300.0


def dies_per_wafer(area: float) -> int:
    """Whole dies of ``area`` mm² on a 300 mm wafer: π(d/2)²/A − πd/√(2A)."""
    return math.floor(math.pi * (WAFER_MM / 2) ** 2 / area - math.pi * WAFER_MM / math.sqrt(2 * area))


def clean(area: float, p: Process) -> float:
    """Share of areas of this size without a defect: (1 + A·D0/α)^−α, the negative binomial model (Stapper 1983)."""
    return float((1.0 + area * p.defects_per_mm2 / p.clustering) ** -p.clustering)


def yielded(c: Chip, how: Yield) -> float:
    """Share of a chip's dies that can be sold.

    ``spare``: all but cores and their ports must be free of defects, and of the cores as many as are sold (binomial:
    as if they failed independently of one another); at least ``plain``.
    """
    if how not in get_args(Yield):
        raise unknown("yield model", how, get_args(Yield))
    if how == "none":
        return 1.0
    p, area = chips.process(c.process), total_mm2(c)
    if how == "plain":
        return clean(area, p)
    n = c.die_cores
    core = sum(core_mm2(c).values()) + die_mm2(c)["crossbar"] / n
    works = clean(core, p)
    enough = sum(math.comb(n, k) * works**k * (1 - works) ** (n - k) for k in range(c.cores, n + 1))
    return max(clean(area, p), clean(area - n * core, p) * enough)


@dataclass(frozen=True, slots=True)
class Rates:
    """The prices that a cost depends on."""

    wafer: float
    """Dollars per wafer."""
    memory: float | None
    """Dollars per gigabyte (1e9 bytes); None: not known."""
    memory_kind: str
    """Of which memory: hbm2e, ddr5."""


def rates(c: Chip, at: Prices) -> Rates:
    """The prices of a chip's process and memory."""
    kind = chips.interface(c.memory.kind).dram
    wafer = at.wafer_dollars.get(c.process, chips.process(c.process).wafer_dollars)
    return Rates(wafer, at.dollars_per_gb.get(kind), kind)


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars of one chip, with what they depend on."""

    area: float
    """Of the die, in mm²."""
    dies: int
    """Per wafer, working or not."""
    share: float
    """Of them that work."""
    gigabytes: float
    rates: Rates

    @property
    def die(self) -> float:
        """Dollars of one working die."""
        return self.rates.wafer / (self.dies * self.share)

    @property
    def memory(self) -> float:
        """Dollars of the memory. Raises :class:`UserError` where its price is not known."""
        if self.rates.memory is None:
            raise UserError(f"no price of {self.rates.memory_kind} memory", "give a TOML file of prices: --prices FILE")
        return self.gigabytes * self.rates.memory

    @property
    def total(self) -> float:
        """Dollars of die and memory."""
        return self.die + self.memory

    def at(self, wafer: float = 1.0, **memory: float) -> Cost:
        """The same with prices multiplied by these factors: of the wafer, and of memory by kind."""
        r = self.rates
        price = None if r.memory is None else r.memory * memory.get(r.memory_kind, 1.0)
        return replace(self, rates=replace(r, wafer=r.wafer * wafer, memory=price))


def cost(c: Chip, at: Prices, how: Yield = "spare") -> Cost:
    """What a chip costs. Raises :class:`UserError` for a die that no wafer holds."""
    area = total_mm2(c)
    dies = dies_per_wafer(area)
    if dies < 1:
        raise UserError(f"{c.name}: a die of {area:.0f} mm² does not fit on a wafer", "take fewer cores or less buffer")
    return Cost(area, dies, yielded(c, how), c.memory.bytes / 1e9, rates(c, at))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Performance per dollar of a design relative to another's, and what it hangs on."""

    ratio: float
    break_even: dict[str, float]
    """By price (wafer, hbm2e, ddr5): the factor on it at which both are worth the same; without those where none is."""
    halved: dict[str, float]
    """The ratio with that price halved."""
    doubled: dict[str, float]
    """The ratio with that price doubled."""

    @property
    def stands(self) -> bool:
        """Whether no single price, halved or doubled, turns the verdict."""
        return all((x > 1) == (self.ratio > 1) for x in (*self.halved.values(), *self.doubled.values()))


def verdict(speed: float, design: Cost, baseline: Cost) -> Verdict:
    """The verdict on a design that is ``speed`` times as fast as its baseline.

    Costs are linear in each price, so the break-even factor f solves speed · baseline(f) = design(f).
    """
    kinds = dict.fromkeys(("wafer", design.rates.memory_kind, baseline.rates.memory_kind))

    def ratio(**factors: float) -> float:
        return speed * baseline.at(**factors).total / design.at(**factors).total

    even, halved, doubled = {}, {}, {}
    for kind in kinds:
        halved[kind], doubled[kind] = ratio(**{kind: 0.5}), ratio(**{kind: 2.0})
        found = _break_even(speed, design, baseline, kind)
        if found is not None:
            even[kind] = found
    return Verdict(ratio(), even, halved, doubled)


def _break_even(speed: float, design: Cost, baseline: Cost, kind: str) -> float | None:
    gap: Callable[[float], float] = lambda f: speed * baseline.at(**{kind: f}).total - design.at(**{kind: f}).total  # noqa: E731
    fixed, slope = gap(0.0), gap(1.0) - gap(0.0)
    return -fixed / slope if slope and -fixed / slope > 0 else None
