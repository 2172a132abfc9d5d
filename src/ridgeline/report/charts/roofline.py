"""The roofline: each operator's arithmetic intensity and rate under the roofs of the machine."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from ridgeline.report.charts.chart import GRAY, Chart, Figure, axis, color, layout, plain
from ridgeline.report.dissection import grouped
from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, count, number, percent, seconds
from ridgeline.spec.result import Result, Row


def roofline_chart(r: Result, environment: dict[str, Any] | None = None, key: str = "roofline") -> Chart | None:
    """Operators with FLOPs, bytes and time as dots. None without any. Roofs from ``environment`` or the result's own:
    ``peak_flops`` (dtype → FLOP/s) and ``memory_bandwidth`` (bytes/s).
    """
    rows = [x for x in grouped(r.breakdown, ("phase", "module", "operator", "kind"))
            if x.flops > 0 and x.bytes > 0 and x.seconds > 0]  # fmt: skip
    if not rows:
        return None
    known = {**(environment or {}), **r.environment}
    peaks = {k: float(v) for k, v in (known.get("peak_flops") or {}).items() if v}
    bandwidth = float(known.get("memory_bandwidth") or 0) or None
    name = r.name or r.experiment_id
    cells = [
        [x.phase, x.module, x.operator, number(x.flops / x.bytes), count(x.flops / x.seconds, "FLOP/s"),
         count(x.bytes / x.seconds, "B/s"), percent(x.roof) if x.roof is not None else NONE, seconds(x.seconds)]
        for x in rows
    ]  # fmt: skip
    columns = [Column("Phase", align="left"), Column("Module", align="left"), Column("Operator", align="left"),
               Column("FLOP per byte", "intensity"), Column("Achieved"), Column("Traffic"), Column("Of roof", "roof"),
               Column("Time")]  # fmt: skip
    text = "Dots are operators, larger ones take longer; memory limits those under the slope, compute the others."
    title = f"Roofline of {name}, {r.source}"
    return Chart(
        key, title, text, _figure(rows, peaks, bandwidth), Table(title, columns, cells).without_empty_columns()
    )


def _figure(rows: list[Row], peaks: dict[str, float], bandwidth: float | None) -> Figure:
    xs = [x.flops / x.bytes for x in rows]
    ys = [x.flops / x.seconds for x in rows]
    top = max(peaks.values(), default=max(ys))
    left, right = min(xs) / 3, max(*xs, *(p / bandwidth for p in peaks.values() if bandwidth)) * 4
    low, high = min(ys) / 3, max(top, *ys) * 2.5
    data: list[Figure] = []
    notes: list[Figure] = []
    if bandwidth:
        end = min(right, top / bandwidth)
        data.append(_roof([left, end], [bandwidth * left, bandwidth * end]))
        middle = math.sqrt(max(left, low / bandwidth) * end)
        notes.append(_note(middle, bandwidth * middle * 1.6, count(bandwidth, "B/s"), "right"))
    for value, names in _levels(peaks).items():
        data.append(_roof([value / bandwidth if bandwidth else left, right], [value, value]))
        notes.append(_note(right, value * 1.12, f"{names} {count(value, 'FLOP/s')}", "right", "bottom"))
    longest = max(x.seconds for x in rows)
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for x in rows:
        by_kind[x.kind].append(x)
    for kind, members in by_kind.items():
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": plain(kind),
                "x": [x.flops / x.bytes for x in members], "y": [x.flops / x.seconds for x in members],
                "text": [plain(f"{x.phase} {x.module} {x.operator}, {seconds(x.seconds)}") for x in members],
                "marker": {"color": color(kind), "opacity": 0.85, "line": {"width": 1, "color": "#ffffff"},
                           "size": [8 + 18 * math.sqrt(x.seconds / longest) for x in members]},
                "hovertemplate": "%{text}<br>%{x:.3g} FLOP/byte<br>%{y:.3s}FLOP/s<extra></extra>",
            }
        )  # fmt: skip
    return {
        "data": data,
        "layout": layout(
            460,
            annotations=notes,
            xaxis=axis("FLOP per byte", type="log", range=[math.log10(left), math.log10(right)], dtick=1),
            yaxis=axis("FLOP/s", type="log", range=[math.log10(low), math.log10(high)], dtick=1, exponentformat="SI"),
            legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "itemsizing": "constant"},
        ),
    }


def _levels(peaks: dict[str, float]) -> dict[float, str]:
    """Dtypes with the same peak share one roof and one label."""
    out: dict[float, list[str]] = defaultdict(list)
    for dtype, value in peaks.items():
        out[value].append(dtype)
    return {v: plain(", ".join(names)) for v, names in sorted(out.items())}


def _roof(x: list[float], y: list[float]) -> Figure:
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "showlegend": False, "hoverinfo": "skip",
            "line": {"color": GRAY, "width": 2}}  # fmt: skip


def _note(x: float, y: float, text: str, xanchor: str, yanchor: str = "middle") -> Figure:
    """A label at data coordinates (log axes place annotations by exponent)."""
    return {"x": math.log10(x), "y": math.log10(y), "text": text, "showarrow": False, "xanchor": xanchor,
            "yanchor": yanchor, "font": {"size": 12}}  # fmt: skip
