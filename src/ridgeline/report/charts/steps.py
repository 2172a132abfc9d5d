"""Step by step: the loss of each plan, and the time of each step of one result."""

from __future__ import annotations

from collections import defaultdict

from ridgeline.report.charts.chart import GRAY, MEASURED, SPARE, Chart, Figure, axis, layout, plain
from ridgeline.report.table import Column, Table
from ridgeline.report.units import TIMES, scale
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.result import Result

LINES = (MEASURED, "#3a9a5b", "#a2488a", "#d8b93c", "#66b8dd", "#e0606e", *SPARE)
DASHES = ("solid", "dash", "dot")


def loss_charts(a: Ablation) -> list[Chart]:
    """Loss against the step number, and its distance from the baseline's: one line per plan, first repeat."""
    curves = {o.name: _curve(o.measured) for o in a.outcomes}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return []
    rows = [[n, f"{min(c.items())[1]:.4f}", f"{max(c.items())[1]:.4f}"] for n, c in curves.items()]
    columns = [Column("Plan", align="left"), Column("First loss"), Column("Last loss", "loss")]
    out = [Chart("loss", "Loss", "Loss of each plan on the same tokens.", _lines(a, curves, "loss, nats per token"),
                 Table("Loss", columns, rows), wide=False)]  # fmt: skip
    base = curves.get(a.baseline)
    if base and len(curves) > 1:
        away = {n: {s: v - base[s] for s, v in c.items() if s in base} for n, c in curves.items()}
        far = {n: max(d.items(), key=lambda sv: abs(sv[1])) for n, d in away.items() if d}
        listed = [[n, f"{v:+.4f}", str(s)] for n, (s, v) in far.items()]
        heads = [Column("Plan", align="left"), Column("Largest distance"), Column("at step")]
        text = "Loss minus the baseline's at the same step: a technique that keeps the computation the same stays at 0."
        out.append(Chart("loss-distance", "Distance from the baseline's loss", text,
                         _lines(a, away, "nats per token"), Table("Distance", heads, listed), wide=False))  # fmt: skip
    return out


def _curve(r: Result | None) -> dict[int, float]:
    """Step → loss of the first repeat."""
    points = [s for s in (r.samples if r else []) if s.loss is not None]
    return {s.step: s.loss for s in points if s.repeat == points[0].repeat and s.loss is not None}


def _lines(a: Ablation, curves: dict[str, dict[int, float]], title: str) -> Figure:
    order = [o.name for o in a.outcomes]
    data = []
    for name, curve in curves.items():
        i = order.index(name)  # a plan keeps its color if another one failed
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": plain(name), "x": list(curve), "y": list(curve.values()),
                "line": {"width": 2, "color": LINES[i % len(LINES)], "dash": DASHES[i // len(LINES) % len(DASHES)]},
                "hovertemplate": f"{plain(name)}<br>step %{{x}}: %{{y:.4f}}<extra></extra>",
            }
        )  # fmt: skip
    return {"data": data, "layout": layout(400, xaxis=axis("step"), yaxis=axis(title))}


def step_chart(r: Result) -> Chart | None:
    """Seconds of every step; warm-up steps are hollow."""
    if not r.samples:
        return None
    unit = scale([s.seconds for s in r.samples], TIMES)
    runs: dict[tuple[int, bool], list[tuple[int, float]]] = defaultdict(list)
    for s in r.samples:
        runs[s.repeat, s.warmup].append((s.step, s.seconds / unit.factor))
    symbols = ("circle", "square", "diamond", "cross", "triangle-up")
    data = []
    for (repeat, warm), points in sorted(runs.items()):
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": f"run {repeat}" + (" warm-up" if warm else ""),
                "x": [p[0] for p in points], "y": [p[1] for p in points],
                "marker": {"color": GRAY if warm else LINES[repeat % len(LINES)], "size": 8,
                           "symbol": symbols[repeat % len(symbols)] + ("-open" if warm else "")},
                "hovertemplate": f"run {repeat}, step %{{x}}: %{{y:.4g}} {unit.label}<extra></extra>",
            }
        )  # fmt: skip
    figure = {"data": data, "layout": layout(340, xaxis=axis("step"), yaxis=axis(f"step time, {unit.label}",
                                                                                rangemode="tozero"))}  # fmt: skip
    return Chart("steps", "Time of each step", "Hollow marks are warm-up and left out of the statistics.", figure)
