"""Chips on the page: a design whose figures change, the device that it makes, what it takes and gives."""

from __future__ import annotations

import re
from typing import Any

from ridgeline.catalog import chips
from ridgeline.hardware.area import total_mm2
from ridgeline.hardware.cost import Yield, cost
from ridgeline.hardware.device import chip_device, watts
from ridgeline.report.dissection import grouped
from ridgeline.search.chip_tables import chip_record
from ridgeline.search.design_space import Space
from ridgeline.spec.chip import Chip
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.result import Result

PREFIX = "chip:"
"""Before a chip's name in ``on``: 4xchip:ga100."""
FIGURES = {
    "cores": "Cores", "core.array.rows": "Rows of an array", "core.array.columns": "Columns of an array",
    "core.sram_bytes": "SRAM of a core", "cache_bytes": "Global buffer", "memory.channels": "Memory stacks",
    "links.count": "Links", "clock": "Clock",
}  # fmt: skip
"""What the page's sliders change, by dotted field."""
MOST = 64
"""How many times its own a figure may be."""
PRICES = "2023-10"
YIELD: Yield = "spare"


def chip_list() -> list[dict[str, Any]]:
    """The catalog's chips, and the figures that the page changes."""
    return [_described(chips.chip(name)) for name in chips.chips()]


def _described(c: Chip) -> dict[str, Any]:
    table = c.model_dump()
    found = ((path, label, _at(table, path)) for path, label in FIGURES.items())
    return {"name": c.name, "title": c.title or c.name, "source": c.source,
            "figures": [{"path": p, "label": label, "value": v} for p, label, v in found if v is not None]}  # fmt: skip


def _at(table: Any, path: str) -> Any:
    for key in path.split("."):
        table = None if table is None else table.get(key)
    return table


def chip_cluster(on: str, changes: dict[str, float]) -> Cluster:
    """A node of chips, ``NUMBERxchip:NAME``, with changed figures. Raises :class:`UserError`."""
    number, _, name = on.partition(PREFIX)
    if not re.fullmatch(r"([1-9][0-9]{0,5}x)?", number):
        raise UserError(f"{on!r} is not a node of chips", f"give 4x{PREFIX}{chips.chips()[0]}; chips have no network")
    if name not in chips.chips():  # names only: a path would read this machine's files
        raise unknown("chip", name, chips.chips(), "the catalog")
    return Cluster(device=chip_device(changed(name, changes)), devices_per_node=int(number[:-1] or 1))


def changed(name: str, changes: dict[str, float]) -> Chip:
    """A catalog chip with other figures. What follows from one of them keeps its ratio: capacity to stacks of memory,
    ports and spares to cores."""
    base = chips.chip(name)
    vary: dict[str, Any] = {}
    for path, value in changes.items():
        own = _at(base.model_dump(), path) if path in FIGURES else None
        if own is None:
            raise UserError(f"{name} has no figure {path!r}", f"change one of {', '.join(FIGURES)}")
        if not 1 <= value <= MOST * own:
            raise UserError(f"{path} = {value} of {name}", f"give a figure from 1 to {MOST} times its own, {own:g}")
        if path == "memory.channels":
            stacks = round(value)
            active = {} if base.memory.active is None else {"active": max(1, round(base.memory.active * stacks / own))}
            vary["memory"] = [{"channels": stacks, "bytes": base.memory.bytes * stacks / own, **active}]
        else:
            vary[path] = [float(value) if path == "clock" else round(value)]
    if not vary:
        return base
    document, _ = chips.chip_document(name)
    made, _ = next(Space(base, document, vary, {}).designs())
    return made.model_copy(update={"name": f"{name}*"})


def chip_answer(c: Chip, result: Result, devices: int) -> dict[str, Any]:
    """What the page shows of a design: area, dollars and watts of a chip, tokens/s per dollar, and its roofline."""
    at = chips.prices(PRICES)
    record, price = chip_record(c, at, YIELD), cost(c, at, YIELD)
    dollars = price.die + price.memory if price.rates.memory is not None else None
    speed = result.metrics.get("tokens_per_s")
    return {
        **record, "total_mm2": total_mm2(c), "dollars": dollars, "watts": watts(c),
        "tokens_per_s_per_dollar": speed.value / (devices * dollars) if speed is not None and dollars else None,
        "operators": _operators(result),
    }  # fmt: skip


def _operators(result: Result) -> list[dict[str, Any]]:
    """Operators with FLOPs, bytes and time, the longest first: FLOP per byte, FLOP/s, and seconds."""
    rows = [r for r in grouped(result.breakdown, ("phase", "module", "operator", "kind"))
            if r.flops > 0 and r.bytes > 0 and r.seconds > 0]  # fmt: skip
    rows.sort(key=lambda r: -r.seconds)
    return [{"name": f"{r.phase} {r.module} {r.operator}", "intensity": r.flops / r.bytes,
             "rate": r.flops / r.seconds, "seconds": r.seconds} for r in rows]  # fmt: skip
