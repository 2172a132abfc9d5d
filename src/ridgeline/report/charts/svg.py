"""An ablation as one SVG picture for a README or a paper: speed-up and peak memory, predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ridgeline.report.charts.chart import FONT, MEASURED, PREDICTED, plain
from ridgeline.report.charts.speed import farthest
from ridgeline.report.tables import verdict_text
from ridgeline.report.units import SIZES, scale, size, times
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric

WIDTH, ROW, TOP = 880, 30, 92
NAMES, BARS, TEXT = 150, 200, 150
"""Pixels for the plans' names, and for the bars and the text of each panel."""

STYLE = f"""
  text {{ font-family: {FONT}; font-size: 13px; }}
  .page {{ fill: #ffffff; }} .ink {{ fill: #1d242c; }} .soft {{ fill: #5c6772; font-size: 12px; }}
  .title {{ font-size: 16px; font-weight: 600; }} .head {{ font-weight: 600; }} .end {{ text-anchor: end; }}
  .middle {{ text-anchor: middle; }} .grid {{ stroke: #e3e7eb; }} .one {{ stroke: #9aa3ad; stroke-dasharray: 2 3; }}
  .spread {{ stroke: #1d242c; stroke-width: 1.5; }} .measured {{ fill: {MEASURED}; }}
  .predicted {{ fill: {PREDICTED}; stroke: #ffffff; stroke-width: 1.5; }}
  @media (prefers-color-scheme: dark) {{
    .page {{ fill: #14181d; }} .ink {{ fill: #e4e9ee; }} .soft {{ fill: #9aa6b2; }} .grid {{ stroke: #2c343d; }}
    .spread {{ stroke: #e4e9ee; }} .predicted {{ stroke: #14181d; }}
  }}
"""


class Panel(NamedTuple):
    """Bars of one quantity, one per plan."""

    title: str
    measured: Sequence[Metric | None]
    predicted: Sequence[float | None]
    text: Sequence[str]
    suffix: str = ""
    line: float | None = None
    """Where a dotted line stands."""


def ablation_svg(a: Ablation) -> str:
    """The picture, on a background of its own, in the reader's light or dark scheme. Raises :class:`UserError` when no
    plan has a speed-up or a peak.
    """
    panels = [p for p in (_speed(a), _memory(a)) if any(p.measured) or any(p.predicted)]
    if not panels:
        raise UserError("this ablation has neither speed-ups nor peaks to draw", "write it as md, csv or html")
    bottom = TOP + ROW * len(a.outcomes)
    height = bottom + 62
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img"><title>{plain(a.name, 80)}: every plan, predicted and measured</title><style>{STYLE}</style>',
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        _say(16, 28, f"{plain(a.name, 40)}: every plan, predicted and measured", "ink title"),
        f'<rect class="measured" x="16" y="42" width="22" height="12"/>{_say(44, 53, "measured, 95 % interval")}',
        f"{_diamond(206, 48)}{_say(218, 53, 'predicted')}",
        *(_say(NAMES - 12, TOP + ROW * (i + 0.5) + 4, plain(o.name, 20), "ink end") for i, o in enumerate(a.outcomes)),
    ]
    for i, panel in enumerate(panels):
        lines += _panel(panel, NAMES + i * (BARS + TEXT + 20), bottom)
    lines.append(_say(16, height - 14, plain(_facts(a), 130)))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _speed(a: Ablation) -> Panel:
    found = a.outcomes
    text = [f"{times(o.speedup.value)} {verdict_text(o)}" if o.speedup and o.name != a.baseline else verdict_text(o)
            for o in found]  # fmt: skip
    return Panel(f"Speed-up over {plain(a.baseline, 16)}", [o.speedup for o in found],
                 [o.predicted_speedup for o in found], text, "×", 1.0)  # fmt: skip


def _memory(a: Ablation) -> Panel:
    measured = [o.measured.peak_bytes if o.measured else None for o in a.outcomes]
    predicted = [o.predicted.peak_bytes if o.predicted else None for o in a.outcomes]
    unit = scale([*measured, *predicted], SIZES)
    return Panel(
        f"Peak memory of one rank, {unit.label}",
        [Metric(value=m / unit.factor) if m else None for m in measured],
        [p / unit.factor if p else None for p in predicted],
        [size(m) if m else "" for m in measured],
    )


def _panel(p: Panel, left: float, bottom: float) -> Iterator[str]:
    values = [m.value if m else None for m in p.measured]
    above = [m.high - m.value if m and m.high is not None else 0.0 for m in p.measured]
    end = 1.05 * farthest(values, list(p.predicted), above)
    yield _say(left, TOP - 14, p.title, "ink head")
    for tick in _ticks(end):
        x = left + BARS * tick / end
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield _say(x, bottom + 16, f"{tick:g}{p.suffix}", "soft middle")
    if p.line is not None:
        x = left + BARS * p.line / end
        yield f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
    for i, (m, guess, text) in enumerate(zip(p.measured, p.predicted, p.text, strict=True)):
        y = TOP + ROW * (i + 0.5)
        if m is not None:
            yield f'<rect class="measured" x="{left}" y="{y - 8}" width="{BARS * m.value / end:.1f}" height="16"/>'
        if m is not None and m.low is not None and m.high is not None:
            low, high = (left + BARS * min(v / end, 1.0) for v in (m.low, m.high))
            yield f'<path class="spread" d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"/>'
        if guess is not None:
            yield _diamond(left + BARS * guess / end, y)
        yield _say(left + BARS + 10, y + 4, text, "ink")


def _ticks(end: float) -> list[float]:
    """Zero and up to five round numbers above it."""
    step = 10.0 ** math.floor(math.log10(end))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if end / s < 6)
    return [round(i * step, 12) for i in range(int(end / step) + 1)]


def _say(x: float, y: float, text: str, style: str = "soft") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:g}">{text}</text>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="predicted" d="M{x:.1f} {y - 6}l6 6l-6 6l-6 -6z"/>'


def _facts(a: Ablation) -> str:
    e = a.environment
    machine = str(e.get("gpu") or e.get("cpu") or "")
    cores = f"{e['cores']} cores" if "cores" in e else ""
    torch = f"PyTorch {e['torch']}" if "torch" in e else ""
    return " · ".join(x for x in (machine, cores, torch, a.command, a.created[:10]) if x)
