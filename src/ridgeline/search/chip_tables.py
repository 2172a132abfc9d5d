"""One design as tables and as plain data: peaks, area by block, power and cost."""

from __future__ import annotations

from typing import Any

from ridgeline.hardware.area import SPREAD, core_mm2, die_mm2, edge_mm, shoreline_mm, total_mm2
from ridgeline.hardware.cost import Cost, Yield, cost
from ridgeline.hardware.device import POWER_SPREAD, energy, power, watts
from ridgeline.report.table import Column, Table
from ridgeline.report.units import count, percent, size
from ridgeline.spec.chip import Chip, Prices


def chip_record(c: Chip, at: Prices, how: str) -> dict[str, Any]:
    """Everything that follows from a design."""
    price = cost(c, at, how)  # type: ignore[arg-type]
    return {
        "name": c.name, "title": c.title, "peak_flops": c.peak_flops, "memory_bandwidth": c.memory.bandwidth,
        "memory_bytes": c.memory.bytes, "area_mm2": die_mm2(c), "core_mm2": core_mm2(c), "edge_mm": edge_mm(c),
        "shoreline_mm": shoreline_mm(total_mm2(c)), "watts": watts(c), "power_model_watts": power(c),
        "joules_per_operation": energy(c),
        "prices": at.date, "dies_per_wafer": price.dies, "yield": price.share, "die_dollars": price.die,
        "memory_dollars": _memory(price),
    }  # fmt: skip


def _memory(price: Cost) -> float | None:
    return None if price.rates.memory is None else price.memory


def chip_tables(c: Chip, at: Prices, how: str) -> list[Table]:
    """Peaks, blocks of the die and of a core, power by part, cost by part."""
    r = chip_record(c, at, how)
    area = total_mm2(c)
    gives = [[dtype, count(rate, "FLOP/s")] for dtype, rate in r["peak_flops"].items()]
    gives += [["memory", count(r["memory_bandwidth"], "B/s")], ["capacity", size(r["memory_bytes"])]]
    if c.links is not None:
        gives.append(["links", count(c.links.count * c.links.bandwidth, "B/s")])
    blocks = [[name, f"{mm2:.1f}", percent(mm2 / area)] for name, mm2 in r["area_mm2"].items()]
    inside = [[f"a core: {name}", f"{mm2:.2f}", ""] for name, mm2 in r["core_mm2"].items()]
    shore = f"{r['edge_mm']:.0f} mm of interfaces on {r['shoreline_mm']:.0f} mm of edge"
    left = Column("", align="left")
    return [
        Table(f"{c.title or c.name} gives", [Column("Peak", align="left"), Column("Rate")], gives),
        Table("Area", [Column("Block", align="left"), Column("mm²"), Column("Of the die")],
              [*blocks, ["die", f"{area:.1f}", ""], *inside],
              [f"within {percent(SPREAD)} for GPU-like chips; arrays of 128 x 128 and large scratchpads are off by"
               " factors", shore]),
        Table("Power", [left, Column("W")], [[k, f"{v:.0f}"] for k, v in r["power_model_watts"].items()]
              + [["rated" if c.watts else "sum", f"{r['watts']:.0f}"]],
              [f"at full arithmetic, memory and link rates; within {percent(POWER_SPREAD)}"]),
        Table("Energy", [left, Column("pJ")], [[name, f"{joules * 1e12:.3g}"] for name, joules in energy(c).items()],
              [f"of one operation; within {percent(POWER_SPREAD)}"]),
        Table(f"Cost at the prices of {at.date}", [left, Column("")], _cost_rows(cost(c, at, how)),  # type: ignore[arg-type]
              [f"yield model: {how}; without package, test, board and design; prices: {at.source}"]),
    ]  # fmt: skip


def _cost_rows(price: Cost) -> list[list[str]]:
    memory, total = "not known", "not known"
    if price.rates.memory is not None:
        memory = f"${price.memory:,.0f} ({price.gigabytes:.0f} GB at ${price.rates.memory:g})"
        total = f"${price.total:,.0f}"
    return [
        ["wafer", f"${price.rates.wafer:,.0f}"],
        ["dies per wafer", str(price.dies)],
        ["that work", percent(price.share)],
        ["die", f"${price.die:,.0f}"],
        [f"memory ({price.rates.memory_kind})", memory],
        ["die and memory", total],
    ]


def list_table(designs: list[Chip], how: Yield = "spare") -> Table:
    """One row per design."""
    rows = [
        [c.name, c.process, str(c.cores), f"{c.core.array.rows}x{c.core.array.columns}", count(max(c.peak_flops.get(
            "bf16", 0.0), c.peak_flops.get("fp32", 0.0)), "FLOP/s"), size(c.memory.bytes), count(c.memory.bandwidth,
            "B/s"), f"{total_mm2(c):.0f}", f"{watts(c):.0f}", c.title]
        for c in designs
    ]  # fmt: skip
    columns = [Column("Chip", align="left"), Column("Process", align="left"), Column("Cores"), Column("Array"),
               Column("Peak"), Column("Memory"), Column("Bandwidth"), Column("Die, mm²"), Column("Power, W"),
               Column("", align="left")]  # fmt: skip
    return Table("Chips", columns, rows)
