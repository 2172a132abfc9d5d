"""What changed in a comparison: rows of the breakdown and categories of memory, before and after."""

from __future__ import annotations

from ridgeline.report.charts.chart import GRAY, MEASURED, Chart, Figure, axis, layout, plain, plans_axis, rows_height
from ridgeline.report.table import Table
from ridgeline.report.units import SIZES, TIMES, Scale, scale
from ridgeline.spec.comparison import Comparison


def movers_charts(c: Comparison, tables: dict[str, Table]) -> list[Chart]:
    """Paired bars for time and for memory. ``tables`` by the first word of their title."""
    out = []
    if c.movers:
        unit = scale([s for r in c.movers for s in (r.a_seconds, r.b_seconds)], TIMES)
        names = [" ".join(x for x in (r.phase, r.module, r.operator) if x) for r in c.movers]
        figure = _pairs(c, names, [r.a_seconds for r in c.movers], [r.b_seconds for r in c.movers], unit, "time")
        out.append(Chart("moved", "What moved most", "Operators by the change of their time, largest first.", figure,
                         tables.get("What")))  # fmt: skip
    if c.memory:
        unit = scale([b for m in c.memory for b in (m.a_bytes, m.b_bytes)], SIZES)
        names = [m.category for m in c.memory]
        figure = _pairs(c, names, [m.a_bytes for m in c.memory], [m.b_bytes for m in c.memory], unit, "memory")
        out.append(Chart("moved-memory", "Memory at the peak", "By category.", figure, tables.get("Memory")))
    return out


def _pairs(c: Comparison, names: list[str], a: list[float], b: list[float], unit: Scale, what: str) -> Figure:
    data = [
        {
            "type": "bar", "orientation": "h", "name": plain(label), "x": [v / unit.factor for v in values],
            "y": list(range(len(names))), "marker": {"color": shade},
            "hovertemplate": f"%{{x:.4g}} {unit.label}<extra>{plain(label)}</extra>",
        }
        for label, values, shade in ((c.a, a, GRAY), (c.b, b, MEASURED))
    ]  # fmt: skip
    return {
        "data": data,
        "layout": layout(
            rows_height(len(names), 38), barmode="group", xaxis=axis(f"{what}, {unit.label}", rangemode="tozero"),
            yaxis=plans_axis(names),
        ),
    }  # fmt: skip
