"""The trust chart: measured against predicted, with the line of perfect prediction and a ±25 % band."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from ridgeline.report.charts.chart import GRAY, MEASURED, Chart, Figure, axis, layout, plain
from ridgeline.report.charts.labels import positions
from ridgeline.report.table import Column, Table
from ridgeline.report.units import COUNTS, NONE, SIZES, metric, percent, scale
from ridgeline.spec.ablation import Ablation, Outcome

BAND = 0.25
NAMED = 10
"""With more dots than this only the worst predictions are labeled; the others show their names on hover."""
WIDTH, HEIGHT = 430, 330
"""About the plot's size in pixels, for placing the names."""

Value = Callable[[Outcome], tuple[float | None, float | None, float | None, float | None]]


def trust_charts(a: Ablation) -> list[Chart]:
    """One for tokens/s, one for peak memory; only those with both sides."""
    charts = [
        _chart(a, "trust-speed", "Predicted and measured throughput", "tokens/s", _speed),
        _chart(a, "trust-memory", "Predicted and measured peak memory", "bytes", _memory),
    ]
    return [c for c in charts if c is not None]


def _speed(o: Outcome) -> tuple[float | None, float | None, float | None, float | None]:
    p, m = (r.metric("tokens_per_s") if r else None for r in (o.predicted, o.measured))
    full = o.measured.metrics.get("tokens_per_s") if o.measured else None
    return p, m, full.low if full else None, full.high if full else None


def _memory(o: Outcome) -> tuple[float | None, float | None, float | None, float | None]:
    p, m = (r.peak_bytes if r else None for r in (o.predicted, o.measured))
    return p, m, None, None


def _chart(a: Ablation, key: str, title: str, unit: str, value: Value) -> Chart | None:
    found = [(o.name, *value(o)) for o in a.outcomes]
    points = [(n, p, m, lo, hi) for n, p, m, lo, hi in found if p and m and p > 0 and m > 0]
    if not points:
        return None
    errors = sorted(abs(m / p - 1) for _, p, m, _, _ in points)
    inside = sum(e <= BAND for e in errors)
    text = (
        f"On the line the prediction is perfect; {inside} of {len(points)} plans lie inside the ±{BAND:.0%} band; "
        f"median error {percent(median(errors))}, worst {percent(errors[-1])}."
    )
    rows = [[n, metric(p, unit), metric(m, unit), percent(m / p - 1, signed=True) if p and m else NONE]
            for n, p, m, _, _ in found]  # fmt: skip
    columns = [Column("Plan", align="left"), Column("Predicted"), Column("Measured"), Column("Residual", "residual")]
    figure = _figure(points, unit)
    return Chart(key, title, text, figure, Table(title, columns, rows), wide=False)


def _figure(points: list[tuple[str, float, float, float | None, float | None]], unit: str) -> Figure:
    values = [v for _, p, m, _, _ in points for v in (p, m)]
    pad = max(1.6, (max(values) / min(values)) ** 0.12)
    low, high = min(values) / pad, max(values) * pad
    span = math.log(high / low)
    names = [plain(n) for n, *_ in points]
    worst = sorted(points, key=lambda x: -abs(x[2] / x[1] - 1))[:NAMED]
    shown = [plain(x[0]) if x in worst else "" for x in points]
    places = positions(
        [(math.log(p / low) / span, math.log(m / low) / span) for _, p, m, _, _ in points], shown, WIDTH, HEIGHT
    )
    ends = [low, high]
    band = {
        "type": "scatter", "mode": "lines", "x": [low, high, high, low], "fill": "toself", "hoverinfo": "skip",
        "y": [low * (1 + BAND), high * (1 + BAND), high * (1 - BAND), low * (1 - BAND)], "line": {"width": 0},
        "fillcolor": "rgba(154,163,173,0.18)", "name": f"±{BAND:.0%}",
    }  # fmt: skip
    line = {
        "type": "scatter", "mode": "lines", "x": ends, "y": ends, "hoverinfo": "skip", "name": "perfect",
        "line": {"color": GRAY, "width": 1.5, "dash": "dot"},
    }  # fmt: skip
    dots = {
        "type": "scatter", "mode": "markers+text", "name": "plans", "cliponaxis": False,
        "x": [p for _, p, *_ in points],
        "y": [m for _, _, m, *_ in points], "text": shown, "hovertext": names, "textposition": places,
        "textfont": {"size": 12}, "marker": {"color": MEASURED, "size": 10, "line": {"width": 1, "color": "#ffffff"}},
        "error_y": {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
                    "array": [hi - m if hi is not None else 0 for _, _, m, _, hi in points],
                    "arrayminus": [m - lo if lo is not None else 0 for _, _, m, lo, _ in points]},
        "hovertemplate": "%{hovertext}<br>predicted %{x:.4s}<br>measured %{y:.4s}<extra></extra>",
    }  # fmt: skip
    ticks = _ticks(low, high, unit)
    scale = {"type": "log", "range": [math.log10(low), math.log10(high)], **ticks}
    return {
        "data": [band, line, dots],
        "layout": layout(
            430, xaxis=axis("predicted", **scale), yaxis=axis("measured", **scale), showlegend=False,
            margin={"l": 10, "r": 16, "t": 12, "b": 44},
        ),
    }  # fmt: skip


def _ticks(low: float, high: float, unit: str) -> Figure:
    """About five round values, in the unit that people read (log axes know no GiB)."""
    base, units, word = (2.0, SIZES, "") if unit == "bytes" else (10.0, COUNTS, " tok/s")
    steps = (1.0,) if unit == "bytes" else (1.0, 2.0, 3.0, 5.0)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    values = [m * base**k for k in range(first, last + 1) for m in steps if low <= m * base**k <= high]
    values = values[:: max(1, math.ceil(len(values) / 5))]
    named = [(v, scale([v], units)) for v in values]
    return {"tickvals": values, "ticktext": [f"{v / s.factor:g}{' ' * (not word)}{s.label}{word}" for v, s in named]}
