"""Memory waterfall: category upon category up to the peak, against what the device holds."""

from __future__ import annotations

from ridgeline.report.charts.chart import GRAY, RED, Chart, Figure, axis, color, layout, plain
from ridgeline.report.table import Column, Table
from ridgeline.report.units import SIZES, percent, scale
from ridgeline.spec.result import MEMORY_CATEGORIES, Result


def waterfall_chart(r: Result, key: str = "waterfall", name: str = "") -> Chart | None:
    """The categories of one result, resident ones first, each starting where the one before it ends."""
    if not r.memory:
        return None
    order = {c: i for i, c in enumerate(("framework", *MEMORY_CATEGORIES))}
    parts = sorted(r.memory, key=lambda m: order.get(m.category, 99))
    peak = sum(m.bytes for m in parts)
    capacity = r.environment.get("memory_bytes")
    # A line far above the bars would only flatten them.
    limit = capacity if isinstance(capacity, (int, float)) and capacity < 4 * peak else None
    unit = scale([peak, limit], SIZES)
    starts, reached = [], 0.0
    for m in parts:
        starts.append(reached)
        reached += m.bytes
    labels = [plain(m.category.replace("_", " ")) for m in parts] + ["peak"]
    heights = [m.bytes / unit.factor for m in parts] + [peak / unit.factor]
    bases = [s / unit.factor for s in starts] + [0.0]
    bar = {
        "type": "bar", "x": labels, "y": heights, "base": bases,
        "marker": {"color": [color(m.category) for m in parts] + [GRAY]},
        "text": [unit.say(m.bytes) for m in parts] + [unit.say(peak)], "textposition": "outside",
        "hovertemplate": f"%{{x}}: %{{y:.4g}} {unit.label}<extra></extra>", "showlegend": False, "cliponaxis": False,
    }  # fmt: skip
    figure: Figure = {
        "data": [bar],
        "layout": layout(
            340, xaxis=axis(showgrid=False, ticks=""), yaxis=axis(f"bytes, {unit.label}", rangemode="tozero")
        ),
    }
    if limit is not None:
        y = limit / unit.factor
        line = {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": y,
            "y1": y,
            "line": {"color": RED, "dash": "dash"},
        }
        figure["layout"]["shapes"] = [line]
    where = f" of {name}" if name else ""
    rows = [[m.category, unit.say(m.bytes), percent(m.bytes / peak)] for m in parts]
    table = Table(
        f"Memory{where}, {unit.label}", [Column("Category", align="left"), Column("Size"), Column("Share")], rows
    )
    text = "From what stays between steps to what lives for a moment; the last bar is the peak."
    return Chart(key, f"Memory waterfall{where}, {r.source}", text, figure, table, wide=False)
