"""Step by step: the loss of each plan, and the time of each step of one result."""

from __future__ import annotations

from collections import defaultdict

from ridgeline.report.charts.base import GREY, MEASURED, SPARE, Chart, Figure, axis, layout, plain
from ridgeline.report.table import Column, Table
from ridgeline.report.tables import final_loss
from ridgeline.report.units import NONE, TIMES, scale
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.result import Result

LINES = (MEASURED, "#3a9a5b", "#a2488a", "#d8b93c", "#66b8dd", "#e0606e", *SPARE)
DASHES = ("solid", "dash", "dot")


def loss_chart(a: Ablation) -> Chart | None:
    """Loss against the step number, one line per plan, first repeat: equal plans lie on one another."""
    data: list[Figure] = []
    rows = []
    for i, o in enumerate(a.outcomes):
        points = [s for s in (o.measured.samples if o.measured else []) if s.loss is not None]
        if not points:
            continue
        points = [s for s in points if s.repeat == points[0].repeat]
        first, last = points[0].loss, final_loss(o.measured)
        rows.append([o.name, NONE if first is None else f"{first:.4f}", NONE if last is None else f"{last:.4f}"])
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": plain(o.name), "x": [s.step for s in points],
                "y": [s.loss for s in points],
                "line": {"width": 2, "color": LINES[i % len(LINES)], "dash": DASHES[i // len(LINES) % len(DASHES)]},
                "hovertemplate": f"{plain(o.name)}<br>step %{{x}}: %{{y:.4f}}<extra></extra>",
            }
        )  # fmt: skip
    if not data:
        return None
    figure = {"data": data, "layout": layout(360, xaxis=axis("step"), yaxis=axis("loss, nats per token"))}
    columns = [Column("Plan", align="left"), Column("First loss"), Column("Last loss", "loss")]
    text = "A technique that keeps the computation the same lies on the baseline's line."
    return Chart("loss", "Loss", text, figure, Table("Loss", columns, rows))


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
                "marker": {"color": GREY if warm else LINES[repeat % len(LINES)], "size": 8,
                           "symbol": symbols[repeat % len(symbols)] + ("-open" if warm else "")},
                "hovertemplate": f"run {repeat}, step %{{x}}: %{{y:.4g}} {unit.label}<extra></extra>",
            }
        )  # fmt: skip
    figure = {"data": data, "layout": layout(340, xaxis=axis("step"), yaxis=axis(f"step time, {unit.label}",
                                                                                rangemode="tozero"))}  # fmt: skip
    return Chart("steps", "Time of each step", "Hollow marks are warm-up and left out of the statistics.", figure)
