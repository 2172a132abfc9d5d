"""Perplexity against checkpoint size, with the Pareto front of the plans."""

from __future__ import annotations

from ridgeline.report.charts.chart import GRAY, MEASURED, Chart, axis, layout, plain
from ridgeline.report.table import Column, Table
from ridgeline.report.units import SIZES, scale
from ridgeline.spec.ablation import Ablation


def frontier(points: list[tuple[str, float, float]]) -> list[str]:
    """Names of the points (name, bytes, perplexity) that no other point matches or beats in both, smallest first."""
    best: list[str] = []
    least = float("inf")
    for name, _, quality in sorted(points, key=lambda p: (p[1], p[2])):
        if quality < least:
            best.append(name)
            least = quality
    return best


def pareto_chart(a: Ablation) -> Chart | None:
    """Perplexity over checkpoint bytes; None where fewer than two plans have both."""
    points: list[tuple[str, float, float]] = []
    spread: list[tuple[float, float]] = []
    for o in a.outcomes:
        m = o.measured
        size, found = (m.metric("checkpoint_bytes"), m.metrics.get("perplexity")) if m else (None, None)
        if size is None or found is None:
            continue
        points.append((o.name, size, found.value))
        ratio, base = o.perplexity_ratio, found.value
        low, high = (ratio.low, ratio.high) if ratio else (None, None)
        # The interval of the paired change: the difficulty that all plans share is no uncertainty between them.
        spread.append(((high / ratio.value - 1) * base if ratio and high else 0.0,
                       (1 - low / ratio.value) * base if ratio and low else 0.0))  # fmt: skip
    if len(points) < 2:
        return None
    unit = scale([size for _, size, _ in points], SIZES)
    best = frontier(points)
    known = {name: (size / unit.factor, quality) for name, size, quality in points}
    dots = {
        "type": "scatter", "mode": "markers+text", "name": "plans",
        "x": [known[n][0] for n, _, _ in points], "y": [known[n][1] for n, _, _ in points],
        "text": [plain(n, 24) for n, _, _ in points], "textposition": "top center", "textfont": {"size": 11},
        "error_y": {"type": "data", "symmetric": False, "array": [s[0] for s in spread],
                    "arrayminus": [s[1] for s in spread], "thickness": 1.2, "width": 4},
        "marker": {"size": 10, "color": [MEASURED if n in best else GRAY for n, _, _ in points]},
        "hovertemplate": "%{text}<br>%{x:.4g} " + unit.label + ", perplexity %{y:.4f}<extra></extra>",
    }  # fmt: skip
    line = {
        "type": "scatter", "mode": "lines", "name": "best for its size", "x": [known[n][0] for n in best],
        "y": [known[n][1] for n in best], "line": {"shape": "hv", "color": MEASURED, "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
    }  # fmt: skip
    figure = {"data": [line, dots], "layout": layout(
        480, xaxis=axis(f"Checkpoint, {unit.label}"), yaxis=axis("Held-out perplexity", type="log"))}  # fmt: skip
    rows = [[n, unit.say(size), f"{quality:.4f}", "✓" if n in best else ""] for n, size, quality in points]
    columns = [Column("Plan", align="left"), Column(f"Checkpoint, {unit.label}", "checkpoint_bytes"),
               Column("Perplexity", "perplexity"), Column("Best for its size")]  # fmt: skip
    text = "Left and down is better. A plan on the dotted line is beaten in both bytes and perplexity by no other."
    return Chart("pareto", "Quality against size", text, figure, Table("Quality against size", columns, rows))
