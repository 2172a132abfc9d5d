"""Bandwidth of collectives and copies against their size, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.report.charts.chart import MEASURED, PREDICTED, SPARE, Chart, Figure, axis, layout
from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, count, seconds, size, times
from ridgeline.spec.study import Study, StudyCell, StudyTable

METRIC = "bandwidth_bytes_per_s"
DASHED = {"dash": "dash"}


def bandwidth_charts(s: Study) -> list[Chart]:
    """One picture per table of operators that were measured by size: bus bandwidth of collectives, bandwidth of
    copies; a solid line for each measured number of ranks, a dashed one for its prediction."""
    charts = []
    for t in s.tables:
        cells = [c for c in s.cells if c.table == t.name and "bytes" in c.axes]
        if any(METRIC in c.measured for c in cells):
            charts.append(_chart(t, sorted(cells, key=lambda c: float(c.axes["bytes"]))))
    return charts


def _chart(t: StudyTable, cells: list[StudyCell]) -> Chart:
    what = "Bus bandwidth" if t.columns == "ranks" else "Bandwidth"
    figure: Figure = {
        "data": [*_lines(t, cells)],
        "layout": layout(360, xaxis=axis("bytes", type="log", exponentformat="SI"),
                         yaxis=axis(f"{what}, B/s", type="log", exponentformat="SI")),
    }  # fmt: skip
    rows = [[size(float(c.axes["bytes"])), *([str(c.axes["ranks"])] if t.columns else []), *_numbers(c)] for c in cells]
    columns = [Column("Size"), *([Column("Ranks")] if t.columns else []), Column("Measured"), Column("Predicted"),
               Column("Time measured"), Column("Time predicted"), Column("Measured over predicted")]  # fmt: skip
    text = f"{what} against size, both on logarithmic scales; dashed: predicted from this machine's profile."
    return Chart(f"bandwidth-{t.name}", t.title, text, figure, Table(t.title, columns, rows), wide=False)


def _lines(t: StudyTable, cells: list[StudyCell]) -> Iterator[Figure]:
    ranks = sorted({int(c.axes["ranks"]) for c in cells}) if t.columns else [0]
    for i, n in enumerate(ranks):
        mine = [c for c in cells if not t.columns or c.axes["ranks"] == n]
        own = f", {n} ranks" if t.columns else ""
        more = None if i == 0 else SPARE[(i - 1) % len(SPARE)]
        for source, color, dash in (("measured", more or MEASURED, {}), ("predicted", more or PREDICTED, DASHED)):
            points = [(c.axes["bytes"], values[METRIC]) for c in mine if METRIC in (values := getattr(c, source))]
            if points:
                yield {
                    "type": "scatter", "mode": "lines+markers" if source == "measured" else "lines",
                    "name": f"{source}{own}", "x": [x for x, _ in points], "y": [y for _, y in points],
                    "line": {"width": 2, "color": color, **dash}, "marker": {"size": 7},
                    "hovertemplate": f"{source}{own}<br>%{{x:.3s}}B<br>%{{y:.3s}}B/s<extra></extra>",
                }  # fmt: skip


def _numbers(c: StudyCell) -> list[str]:
    rates = [count(v, "B/s") if (v := side.get(METRIC)) else NONE for side in (c.measured, c.predicted)]
    took = [side.get("operator_s") for side in (c.measured, c.predicted)]
    ratio = times(took[0] / took[1]) if took[0] and took[1] else NONE
    return [*rates, *map(seconds, took), ratio]
