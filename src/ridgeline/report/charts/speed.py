"""Speed-up and tokens/s per plan: measured bars with their intervals, predictions as diamonds on the same line."""

from __future__ import annotations

import math

from ridgeline.report.charts.chart import (
    GRAY,
    MEASURED,
    PREDICTED,
    Chart,
    Figure,
    axis,
    layout,
    plain,
    plans_axis,
    rows_height,
)  # fmt: skip
from ridgeline.report.table import Column, Table
from ridgeline.report.tables import both, speedup_text, verdict_text
from ridgeline.report.units import COUNTS, scale, times
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.result import Metric


def speedup_chart(a: Ablation) -> Chart | None:
    """Speed-up over the baseline; None when nothing was measured or predicted."""
    measured = [o.speedup for o in a.outcomes]
    predicted = [o.predicted_speedup for o in a.outcomes]
    if not any(measured) and not any(predicted):
        return None
    names = [o.name for o in a.outcomes]
    figure = _bullets(names, measured, predicted, "Speed-up over the baseline", "×")
    figure["layout"]["shapes"] = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1,
         "line": {"color": GRAY, "width": 1.5, "dash": "dot"}}
    ]  # fmt: skip
    rows = [[o.name, times(o.predicted_speedup), speedup_text(o) if o.speedup else "–", verdict_text(o)]
            for o in a.outcomes]  # fmt: skip
    columns = [Column("Plan", align="left"), Column("Predicted"), Column("Measured", "speedup"),
               Column("Verdict", "verdict", "left")]  # fmt: skip
    text = (
        "Bars are measured, with their 95 % intervals; diamonds are predicted. "
        "Only a bar whose interval stays clear of 1 shows a difference."
    )
    return Chart("speedup", "Speed-up over the baseline", text, figure, Table("Speed-up", columns, rows), wide=False)


def tokens_chart(a: Ablation) -> Chart | None:
    """Tokens/s per plan."""
    sides = [(o.predicted, o.measured) for o in a.outcomes]
    unit = scale([r.metric("tokens_per_s") for pair in sides for r in pair if r], COUNTS)
    measured = [m.metrics.get("tokens_per_s") if m else None for _, m in sides]
    predicted = [p.metric("tokens_per_s") if p else None for p, _ in sides]
    if not any(measured) and not any(predicted):
        return None
    names = [o.name for o in a.outcomes]
    figure = _bullets(names, measured, predicted, f"{unit.label} tokens/s".strip(), "", unit.factor)
    rows = [
        [name, both(unit.say(p), unit.say(m.value if m else None)),
         f"{unit.say(m.low)} – {unit.say(m.high)}" if m and m.low is not None else "–"]
        for name, p, m in zip(names, predicted, measured, strict=True)
    ]  # fmt: skip
    columns = [Column("Plan", align="left"), Column(f"{unit.label} tokens/s, pred | meas", "tokens_per_s"),
               Column("95 % interval", "interval")]  # fmt: skip
    return Chart("tokens", "Throughput", "Tokens per second over all ranks, counted once.", figure,
                 Table("Throughput", columns, rows), wide=False)  # fmt: skip


def _bullets(
    names: list[str],
    measured: list[Metric | None],
    predicted: list[float | None],
    title: str,
    suffix: str,
    factor: float = 1.0,
) -> Figure:
    values = [m.value / factor if m else None for m in measured]
    above = [(m.high - m.value) / factor if m and m.high is not None else 0 for m in measured]
    below = [(m.value - m.low) / factor if m and m.low is not None else 0 for m in measured]
    guesses = [p / factor if p is not None else None for p in predicted]
    hover = f"%{{text}}<br>%{{x:.4g}}{suffix}"
    spread = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5, "width": 5}
    bars = {
        "type": "bar", "orientation": "h", "name": "measured", "x": values, "y": list(range(len(names))), "width": 0.56,
        "marker": {"color": MEASURED}, "error_x": spread, "text": [plain(n) for n in names], "textposition": "none",
        "hovertemplate": hover + " measured<extra></extra>",
    }  # fmt: skip
    dots = {
        "type": "scatter", "mode": "markers", "name": "predicted", "x": guesses, "y": list(range(len(names))),
        "marker": {"symbol": "diamond", "size": 11, "color": PREDICTED, "line": {"width": 1.5, "color": "#ffffff"}},
        "text": [plain(n) for n in names], "hovertemplate": hover + " predicted<extra></extra>",
    }  # fmt: skip
    data = [t for t, known in ((bars, any(measured)), (dots, any(predicted))) if known]
    return {
        "data": data,
        "layout": layout(
            rows_height(len(names)),
            xaxis=axis(title, range=[0, 1.08 * farthest(values, guesses, above)], ticksuffix=suffix),
            yaxis=plans_axis(names),
        ),
    }


def farthest(values: list[float | None], guesses: list[float | None], above: list[float]) -> float:
    """The end of the axis: past every bar and diamond; intervals more than twice as long run out of the picture."""
    known = [v for v in (*values, *guesses) if v is not None and math.isfinite(v)]
    largest = max(known, default=1.0) or 1.0
    ends = [v + e for v, e in zip(values, above, strict=True) if v is not None and math.isfinite(v + e)]
    return max(largest, min(2 * largest, max(ends, default=0.0)))
