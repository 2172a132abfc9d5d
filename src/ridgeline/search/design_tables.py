"""A sweep's answer as tables, as plain data, and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ridgeline.hardware.cost import Verdict
from ridgeline.report.charts.designs import Point, designs_svg
from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, metric, number, percent, times
from ridgeline.search.designs import Design, Sweep

ALIKE = 0.01
"""Designs of the front that differ by less in all that they are judged by are shown once."""
_NAMES = {"dollars": "$", "area_mm2": "mm²", "watts": "W", "tokens_per_s": "tokens/s", "ttft_s": "s", "tpot_s": "s",
          "step_time_s": "s", "e2e_s": "s"}  # fmt: skip


def sweep_tables(w: Sweep) -> list[Table]:
    """The front with its prices and what bounds each design, and the verdicts with what they hang on."""
    front = shown(w)
    latencies = [k for k in ("ttft_s", "tpot_s", "step_time_s") if any(k in d.metrics for d in front)]
    columns = [Column("#", align="left"), Column("Design", align="left"), Column("Die, mm²"), Column("Power, W"),
               Column("Die"), Column("Memory"), Column("Throughput", "tokens_per_s"),
               *(Column(k.removesuffix("_s").replace("step_time", "step").upper(), k) for k in latencies),
               Column("Tokens/s per $"), Column("Bound by", align="left")]  # fmt: skip
    common = set.intersection(*(set(d.choice.split()) for d in front)) if len(front) > 1 else set()
    rows = [_row(str(i), _without(d.choice, common), d, w, latencies) for i, d in numbered(w, front)]
    if w.base.metrics:
        rows.append(_row("", w.base.chip.name, w.base, w, latencies))
    e = w.experiment
    title = f"Front of {len(w.designs)} designs in {', '.join(w.axes)}: {e.model.name} on {e.world} each"
    notes = [_counts(w)]
    if common:
        notes.append(f"all of them: {' '.join(x for x in front[0].choice.split() if x in common)}")
    if len(front) < len(w.front):
        notes.append(f"{len(w.front) - len(front)} more on the front differ by less than {percent(ALIKE)}")
    notes.append("areas within 10 % for GPU-like chips, power within 40 %, times as of a device known by its datasheet")
    plans = [f"design {i}: {' '.join(d.plan)}" for i, d in numbered(w, front) if d.plan]
    tables = [Table(title, columns, rows, [*notes, *plans])]
    if verdicts := _verdicts(w, front):
        tables.append(verdicts)
    return tables


def shown(w: Sweep) -> list[Design]:
    """The front without designs that are alike: each against the last one shown."""
    out: list[Design] = []
    for d in w.front:
        last = out[-1] if out else None
        if last is None or any(abs(d.metrics[a] / last.metrics[a] - 1) >= ALIKE for a in w.axes if a != w.axes[0]):
            out.append(d)
    return out


def numbered(w: Sweep, designs: list[Design]) -> list[tuple[int, Design]]:
    """Designs with their place on the whole front, as in the picture."""
    places = {d.chip.name: i for i, d in enumerate(w.front, 1)}
    return [(places[d.chip.name], d) for d in designs]


def _without(choice: str, common: set[str]) -> str:
    return " ".join(x.removeprefix("core.") for x in choice.split() if x not in common)


def _row(number_: str, choice: str, d: Design, w: Sweep, latencies: list[str]) -> list[str]:
    assert d.cost is not None
    bound = ", ".join(f"{name} {percent(share)}" for name, share in list(w.bounds(d).items())[:2])
    return [number_, choice, f"{d.area:.0f}", f"{d.watts:.0f}", f"${d.cost.die:,.0f}", f"${d.cost.memory:,.0f}",
            metric(d.metrics["tokens_per_s"], "tokens/s"), *(metric(d.metrics.get(k), "s") for k in latencies),
            number(d.metrics["tokens_per_s_per_dollar"]), bound]  # fmt: skip


def _counts(w: Sweep) -> str:
    kept = sum(not d.dropped for d in w.designs)
    why = ", ".join(f"{n} {reason}" for reason, n in w.dropped.most_common())
    return f"{kept} of {len(w.designs)} designs keep the limits" + (f"; dropped by: {why}" if why else "")


def _verdicts(w: Sweep, front: list[Design]) -> Table | None:
    found = [(i, v) for i, d in numbered(w, front) if (v := w.verdict(d)) is not None]
    if not found:
        return None
    kinds = list(dict.fromkeys(k for _, v in found for k in v.halved))
    columns = [Column("#", align="left"), Column("Tokens/s per $ against the base"),
               *(Column(f"{k} price halved | doubled") for k in kinds), Column("Break-even", align="left"),
               Column("Stands", align="left")]  # fmt: skip
    rows = [[str(i), times(v.ratio), *(_both(v, k) for k in kinds), break_even(v), "✓" if v.stands else "✗"]
            for i, v in found]  # fmt: skip
    notes = ["break-even: the factor on one price at which design and base are worth the same; a verdict stands where"
             " no price, halved or doubled, turns it"]  # fmt: skip
    return Table(f"Verdicts against {w.base.chip.name}", columns, rows, notes)


def _both(v: Verdict, kind: str) -> str:
    return f"{times(v.halved[kind])} | {times(v.doubled[kind])}" if kind in v.halved else NONE


def break_even(v: Verdict) -> str:
    """The factors on prices at which the verdict turns."""
    return ", ".join(f"{k} at {times(f)}" for k, f in v.break_even.items()) or "at no price"


def as_dict(w: Sweep) -> dict[str, Any]:
    """The whole sweep as plain data."""
    return {
        "axes": list(w.axes),
        "designs": len(w.designs),
        "dropped": dict(w.dropped),
        "base": _record(w.base),
        "front": [{**_record(d), "bounds": w.bounds(d), "verdict": _verdict(w.verdict(d))} for d in w.front],
    }


def _record(d: Design) -> dict[str, Any]:
    cost = {"die": d.cost.die, "memory": d.cost.memory, "yield": d.cost.share} if d.cost else None
    return {"design": d.choice, "name": d.chip.name, "area_mm2": d.area, "watts": d.watts, "dollars": cost,
            "plan": list(d.plan), "metrics": d.metrics, "dropped": d.dropped}  # fmt: skip


def _verdict(v: Verdict | None) -> dict[str, Any] | None:
    return None if v is None else asdict(v)


def sweep_svg(w: Sweep) -> str:
    """The picture of the designs by the first two metrics."""
    x, y = w.axes[:2]
    names = {d.chip.name for d in w.front}
    points = [Point(d.choice, d.metrics[x], d.metrics[y], d.chip.name in names) for d in w.designs if not d.dropped]
    base = Point(w.base.chip.name, w.base.metrics[x], w.base.metrics[y], False) if w.base.metrics else None
    e = w.experiment
    title = f"{len(w.designs)} designs, {e.world} of each, {e.model.name}: {y} against {x}"
    return designs_svg(title, points, _axis(x), _axis(y), base)


def _axis(name: str) -> str:
    unit = _NAMES.get(name, "")
    return f"{name} of all devices, {unit}" if unit else name
