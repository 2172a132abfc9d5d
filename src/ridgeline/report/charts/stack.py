"""Stacked bars: where the time of a step and the bytes of the peak go, plan by plan, measured above predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ridgeline.report.charts.chart import Chart, Figure, axis, color, layout, plain, rows_height
from ridgeline.report.dissection import attributed
from ridgeline.report.table import Column, Table
from ridgeline.report.tables import memory_categories
from ridgeline.report.units import NONE, SIZES, TIMES, Scale, scale
from ridgeline.spec.result import PHASES, Result

MOST = 10
"""More colors than this are indistinguishable: the smallest parts are merged."""
REST = "smaller kinds"

Bar = tuple[str, str, dict[str, float]]
"""Plan, source, and the amount of each part."""
Plans = Sequence[tuple[str, Sequence[Result]]]
"""Each plan with the results that it has."""


def step_charts(plans: Plans) -> list[Chart]:
    """Time of one step by phase, and by kind of operator."""
    return [c for c in (_time(plans, "phase"), _time(plans, "kind")) if c is not None]


def memory_chart(plans: Plans) -> Chart | None:
    """Bytes of one rank at the peak, by category."""
    results = [r for _, rs in plans for r in rs]
    bars = _bars(plans, lambda r: {m.category: m.bytes for m in r.memory})
    text = "What one rank holds at the instant of its peak. The whole bar is the peak."
    return stacked_chart("memory", "Memory at the peak", text, bars, memory_categories(results), SIZES, "peak memory")


def _time(plans: Plans, key: str) -> Chart | None:
    def parts(r: Result) -> dict[str, float]:
        out: dict[str, float] = defaultdict(float)
        for row in attributed(r):
            out["unattributed" if row.kind == "unattributed" else getattr(row, key)] += row.seconds
        return out

    bars = _bars(plans, parts)
    amount: dict[str, float] = defaultdict(float)
    for _, _, found in bars:
        for name, value in found.items():
            amount[name] += value
    # Phases have an order of their own; kinds stand by size. What is left over comes last.
    rank = {p: i for i, p in enumerate(("prefill", "decode", *PHASES))} if key == "phase" else {}
    order = sorted((n for n in amount if amount[n]), key=lambda n: (n == "unattributed", rank.get(n, 50), -amount[n]))
    if len(order) > MOST:
        kept = set(order[: MOST - 2]) | {"unattributed"}
        bars = [(name, source, _lumped(found, kept)) for name, source, found in bars]
        order = [
            *(p for p in order if p in kept and p != "unattributed"),
            REST,
            *(["unattributed"] if "unattributed" in amount else []),
        ]
    words = {"phase": "by phase", "kind": "by kind of operator"}[key]
    text = f"Seconds of one step {words}. Work that runs at the same time is counted in each part."
    return stacked_chart(f"time-{key}", f"Step time {words}", text, bars, order, TIMES, "time of one step")


def _lumped(found: dict[str, float], kept: set[str]) -> dict[str, float]:
    """The parts in ``kept``, and the sum of the others as one."""
    rest = sum(v for k, v in found.items() if k not in kept)
    return {k: v for k, v in found.items() if k in kept} | ({REST: rest} if rest else {})


def _bars(plans: Plans, parts: Callable[[Result], dict[str, float]]) -> list[Bar]:
    bars = [(name, r.source, parts(r)) for name, results in plans for r in results]
    return [(name, source, found) for name, source, found in bars if sum(found.values()) > 0]


def stacked_chart(
    key: str, title: str, text: str, bars: list[Bar], order: Sequence[str], units: tuple[Scale, ...], what: str
) -> Chart | None:
    """Horizontal bars of parts in the given ``order`` of color; None without bars. ``what`` names the axis."""
    if not bars:
        return None
    unit = scale([sum(b[2].values()) for b in bars], units)
    rows = [[name, source, *(unit.say(f[p]) if p in f else NONE for p in order), unit.say(sum(f.values()))]
            for name, source, f in bars]  # fmt: skip
    columns = [Column("Plan", align="left"), Column("Source", align="left"),
               *(Column(p.replace("_", " ").capitalize(), p) for p in order), Column("Total")]  # fmt: skip
    table = Table(f"{title}, {unit.label}", columns, rows)
    return Chart(key, title, text, _figure(bars, order, unit, f"{what}, {unit.label}"), table)


def _figure(bars: list[Bar], order: Sequence[str], unit: Scale, title: str) -> Figure:
    """A plan's bars stand close together, plans apart: positions are set by hand."""
    places: list[float] = []
    labels: list[str] = []
    last = ""
    for name, source, _ in bars:
        paired = bool(places) and name == last
        places.append((places[-1] + 0.62 if paired else places[-1] + 1.05) if places else 0.0)
        labels.append(source if paired else f"{plain(name)} · {source}")
        last = name
    data = []
    for part in order:
        amounts = [f.get(part, 0.0) / unit.factor for _, _, f in bars]
        data.append(
            {
                "type": "bar", "orientation": "h", "name": plain(part.replace("_", " ")), "x": amounts, "y": places,
                "width": [0.54] * len(bars), "text": labels, "textposition": "none",
                "marker": {"color": color(part), "opacity": [1.0 if s == "measured" else 0.6 for _, s, _ in bars],
                           "line": {"width": 0}},
                "hovertemplate": f"%{{text}}<br>{plain(part)} %{{x:.4g}} {unit.label}<extra></extra>",
            }
        )  # fmt: skip
    return {
        "data": data,
        "layout": layout(
            rows_height(len(bars), 26) + 20,
            barmode="stack",
            xaxis=axis(title, rangemode="tozero"),
            yaxis=axis(
                tickvals=places, ticktext=labels, range=[places[-1] + 0.5, -0.5], showgrid=False, ticks="",
                tickfont={"size": 12},
            ),
        ),
    }  # fmt: skip
