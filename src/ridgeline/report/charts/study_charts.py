"""Pictures of a study's tables: parts of a step as stacked bars, distributions of latencies, metrics over a numeric
axis as lines, and otherwise as bars."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.report.charts.chart import PREDICTED, SPARE, Chart, Figure, axis, layout, plain, rows_height
from ridgeline.report.charts.load_charts import LINES, NAMES
from ridgeline.report.charts.stack import Bar, stacked_chart
from ridgeline.report.units import COUNTS, SIZES, TIMES, Scale, number, scale
from ridgeline.spec.result import PHASES
from ridgeline.spec.study import Axis, StudyCell, StudyTable

RATIOS = (Scale(1, ""),)
FEWEST = 3
"""Values of a numeric axis from which on its cells are a line."""


def page_charts(t: StudyTable, cells: list[StudyCell], title: str, key: str) -> list[Chart]:
    """The pictures of one page of a table, whose ``cells`` they are; ``key`` names them in the report."""
    if t.parts:
        return _parts(t, cells, title, key)
    if t.cdf:
        return _distributions(t, cells, title, key)
    first = t.rows[0]
    numbers = dict.fromkeys(c.axes[first] for c in cells)
    metric = "bandwidth_bytes_per_s" if "bandwidth_bytes_per_s" in t.show else t.show[0]
    shown = [c for c in cells if _either(c, metric) is not None and _drawn(t, c)]
    if not shown:
        return []
    if len(t.rows) == 1 and len(numbers) >= FEWEST and all(isinstance(v, (int, float)) for v in numbers):
        return [_lines(t, shown, metric, _columns(t, cells), title, key)]
    return [_bars(t, shown, metric, _columns(t, cells), title, key)]


def _columns(t: StudyTable, cells: list[StudyCell]) -> list[Axis]:
    """The page's columns: each has its color, even where another has nothing to show."""
    return list(dict.fromkeys(c.axes[t.columns] for c in cells)) if t.columns else [""]


def _drawn(t: StudyTable, c: StudyCell) -> bool:
    return c.status == "ok" or (c.status == "infeasible" and t.beyond_memory)


def _either(c: StudyCell, metric: str) -> float | None:
    return c.measured.get(metric, c.predicted.get(metric))


def _row(t: StudyTable, c: StudyCell) -> str:
    return " ".join(str(c.axes[r]) for r in t.rows)


def _units(metric: str) -> tuple[Scale, ...]:
    if metric.endswith("_bytes"):
        return SIZES
    return COUNTS if metric.endswith("_per_s") else TIMES if metric.endswith("_s") else RATIOS


def _name(metric: str, unit: Scale) -> str:
    if metric.endswith("_per_s"):
        return f"{unit.label} {metric.removesuffix('_per_s').removeprefix('bandwidth_')}/s".strip()
    return f"{metric.removesuffix('_s').replace('_', ' ')}{f', {unit.label}' if unit.label else ''}"


def _sources(c: StudyCell, metric: str) -> list[tuple[str, float]]:
    """The cell's values with their sources, measured first."""
    return [(name, values[metric]) for name, values in (("measured", c.measured), ("predicted", c.predicted))
            if metric in values]  # fmt: skip


def _parts(t: StudyTable, cells: list[StudyCell], title: str, key: str) -> list[Chart]:
    bars: list[Bar] = []
    for c in cells:
        name = " ".join([_row(t, c), *([str(c.axes[t.columns])] if t.columns else [])])
        for source, parts in (("predicted", c.parts), ("measured", c.measured_parts)):
            if sum(parts.values()) > 0 and (source == "measured" or _drawn(t, c)):
                bars.append((name, source, _merged(parts)))
    known = dict.fromkeys(p for _, _, parts in bars for p, v in parts.items() if v > 0)
    order = sorted(known, key=lambda p: PHASES.index(p) if p in PHASES else len(PHASES))
    text = "Seconds that nothing else hides, by part" + (", all phases together." if t.parts == "module" else ".")
    chart = stacked_chart(key, title, text, bars, order, TIMES, "time of one step")
    if chart is None:
        return []
    chart.table = None  # it stands beside the picture
    return [chart]


def _merged(parts: dict[str, float]) -> dict[str, float]:
    """The seconds of modules over all phases: a picture has too few colors for both."""
    found: dict[str, float] = {}
    for name, seconds in parts.items():
        module = name.rpartition("/")[2]
        found[module] = found.get(module, 0.0) + seconds
    return found


def _distributions(t: StudyTable, cells: list[StudyCell], title: str, key: str) -> list[Chart]:
    """One picture per column: the share of requests within a time, a line per row."""
    charts = []
    for i, column in enumerate(_columns(t, cells)):
        mine = [c for c in cells if not t.columns or c.axes[t.columns] == column]
        known = [(f"{_row(t, c)}{f', {source}' if c.measured_latencies else ''}", source, points)
                 for c in mine for source, points in (("predicted", c.latencies), ("measured", c.measured_latencies))
                 if points and _drawn(t, c)]  # fmt: skip
        if not known:
            continue
        unit = scale([points[-1] for _, _, points in known], TIMES)
        data = [
            _curve(
                name,
                LINES[j % len(LINES)],
                source == "predicted" and any(s == "measured" for _, s, _ in known),
                [p / unit.factor for p in points],
                unit,
            )
            for j, (name, source, points) in enumerate(known)
        ]
        figure: Figure = {
            "data": data,
            "layout": layout(320, xaxis=axis(f"{NAMES[f'{t.cdf}_s']}, {unit.label}", rangemode="tozero"),
                             yaxis=axis("", ticksuffix=" %", range=[0, 101])),
        }  # fmt: skip
        charts.append(Chart(f"{key}-{i}", f"{title}{f', {column}' if column else ''}", "Share of requests that took at"
                            " most so long.", figure, wide=False))  # fmt: skip
    return charts


def _curve(name: str, color: str, dashed: bool, points: list[float], unit: Scale) -> Figure:
    share = [100 * k / max(1, len(points) - 1) for k in range(len(points))]
    return {
        "type": "scatter", "mode": "lines", "name": plain(name), "x": points, "y": share,
        "line": {"width": 2, "color": color, "dash": "dash" if dashed else "solid"},
        "hovertemplate": f"{plain(name)}<br>%{{y:.0f}} % within %{{x:.4g}} {unit.label}<extra></extra>",
    }  # fmt: skip


def _lines(t: StudyTable, cells: list[StudyCell], metric: str, across: list[Axis], title: str, key: str) -> Chart:
    """Lines over the numeric row axis, one per column: solid for what was measured."""
    x_name = t.rows[0]
    bytes_ = x_name == "bytes"
    unit = RATIOS[0] if bytes_ else scale([v for c in cells for _, v in _sources(c, metric)], _units(metric))
    told = any(c.measured for c in cells)
    data = []
    for i, column in enumerate(across):
        mine = sorted((c for c in cells if not t.columns or c.axes[t.columns] == column), key=lambda c: c.axes[x_name])
        for source in ("measured", "predicted"):
            points = [(c.axes[x_name], v / unit.factor) for c in mine for s, v in _sources(c, metric) if s == source]
            if points:
                name = ", ".join(x for x in (str(column), source if told else "") if x) or source
                data.append({
                    "type": "scatter", "mode": "lines+markers", "name": plain(name), "x": [x for x, _ in points],
                    "y": [y for _, y in points], "marker": {"size": 7},
                    "line": {"width": 2, "color": LINES[i % len(LINES)],
                             "dash": "dash" if told and source == "predicted" else "solid"},
                    "hovertemplate": f"{plain(name)}<br>{x_name} %{{x:.4g}}: %{{y:.4g}} {unit.label}<extra></extra>",
                })  # fmt: skip
    log = {"type": "log", "exponentformat": "SI"} if bytes_ else {}
    figure: Figure = {"data": data, "layout": layout(340, xaxis=axis(x_name, **log),
                      yaxis=axis(_name(metric, unit), **(log or {"rangemode": "tozero"})))}  # fmt: skip
    text = "Solid lines are measured, dashed ones predicted." if told else "Predicted."
    return Chart(key, title, text, figure, wide=False)


def _bars(t: StudyTable, cells: list[StudyCell], metric: str, across: list[Axis], title: str, key: str) -> Chart:
    """Horizontal bars: a group per row, a color per column; diamonds are predictions beside what was measured."""
    rows = list(dict.fromkeys(_row(t, c) for c in cells))
    unit = scale([v for c in cells for _, v in _sources(c, metric)], _units(metric))
    thick = 0.8 / len(across)
    told = any(metric in c.measured for c in cells)
    data: list[Figure] = []
    guesses: list[tuple[float, float, str]] = []
    for i, column in enumerate(across):
        bars: list[tuple[float, float, str]] = []
        for c in (c for c in cells if not t.columns or c.axes[t.columns] == column):
            place = rows.index(_row(t, c)) - 0.4 + thick * (i + 0.5)
            source, value = _sources(c, metric)[0]
            label = " ".join(x for x in (_row(t, c), str(column)) if x)
            bars.append((value / unit.factor, place, f"{label}, {source}"))
            if source == "measured" and metric in c.predicted:
                guesses.append((c.predicted[metric] / unit.factor, place, label))
        data.append({
            "type": "bar", "orientation": "h", "name": plain(str(column)) or _name(metric, unit), "width": 0.9 * thick,
            "marker": {"color": LINES[i % len(LINES)]}, "textposition": "none", **_xy(bars),
            "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit.label}<extra></extra>",
        })  # fmt: skip
    if guesses:
        data.append({
            "type": "scatter", "mode": "markers", "name": "predicted", **_xy(guesses),
            "marker": {"symbol": "diamond", "size": 9, "color": PREDICTED if len(across) == 1 else SPARE[1]},
            "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit.label} predicted<extra></extra>",
        })  # fmt: skip
    height = rows_height(len(rows), max(22, 13 * len(across) + 6))
    figure: Figure = {
        "data": data,
        "layout": layout(
            height, xaxis=axis(_name(metric, unit), rangemode="tozero"), showlegend=len(across) > 1 or bool(guesses),
            yaxis=axis(tickvals=list(range(len(rows))), ticktext=[plain(r) for r in rows],
                       range=[len(rows) - 0.5, -0.5], showgrid=False, ticks="", tickfont={"size": 12})),
    }  # fmt: skip
    best = max(cells, key=lambda c: _either(c, metric) or 0.0)
    most = number((_either(best, metric) or 0.0) / unit.factor)
    text = f"Bars are {'measured' if told else 'predicted'}; the longest is {most} {unit.label}".rstrip() + "."
    return Chart(key, title, text, figure, wide=len(rows) > 12)


def _xy(points: Sequence[tuple[float, float, str]]) -> Figure:
    return {
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "text": [plain(s, 80) for _, _, s in points],
    }
