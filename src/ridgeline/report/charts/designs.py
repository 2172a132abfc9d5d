"""The picture of a sweep: every design by price and throughput, and the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.report.charts.chart import plain
from ridgeline.report.charts.svg import STYLE

WIDTH, HEIGHT = 880, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 30, 84, 54
_LABELS = 7


class Point(NamedTuple):
    """One design: its place, and whether it is on the front."""

    name: str
    x: float
    y: float
    best: bool


def designs_svg(title: str, points: Sequence[Point], x: str, y: str, base: Point | None = None) -> str:
    """A scatter of designs on logarithmic axes named ``x`` and ``y``, in the reader's light or dark scheme."""
    shown = [*points, *([base] if base else [])]
    across, up = _axis([p.x for p in shown]), _axis([p.y for p in shown])

    def place(p: Point) -> tuple[float, float]:
        return (_LEFT + across.share(p.x) * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up.share(p.y) * _tall())

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img"><title>{plain(title, 100)}</title><style>{STYLE}'
        " .dot { fill: #9aa3ad; fill-opacity: 0.45; } .front { fill: none; stroke: #2f6db3; stroke-dasharray: 3 3; }"
        f"</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _say(16, 28, plain(title, 100), "ink title"),
        f'<circle class="measured" cx="26" cy="52" r="5"/>{_say(38, 56, "front")}<circle class="dot" cx="96" cy="52"'
        f' r="4"/>{_say(106, 56, f"{sum(not p.best for p in points)} other designs")}',
    ]
    for tick in across.ticks():
        at = _LEFT + across.share(tick) * (WIDTH - _LEFT - _RIGHT)
        lines.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
                     + _say(at, HEIGHT - _BOTTOM + 18, f"{tick:,g}", "soft middle"))  # fmt: skip
    for tick in up.ticks():
        at = HEIGHT - _BOTTOM - up.share(tick) * _tall()
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     + _say(_LEFT - 8, at + 4, f"{tick:,g}", "soft end"))  # fmt: skip
    lines.append(_say((_LEFT + WIDTH) / 2, HEIGHT - 12, plain(x, 80), "soft middle"))
    lines.append(_say(_LEFT - 8, _TOP - 10, plain(y, 80)))
    for p in points:
        if not p.best:
            a, b = place(p)
            lines.append(
                f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3"><title>{plain(p.name, 120)}</title></circle>'
            )
    front = sorted((p for p in points if p.best), key=lambda p: p.x)
    path = " ".join(f"{'M' if i == 0 else 'L'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(map(place, front)))
    lines.append(f'<path class="front" d="{path}"/>')
    for i, p in enumerate(front):
        a, b = place(p)
        lines.append(
            f'<circle class="measured" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{plain(p.name, 120)}</title></circle>'
        )
        if i % max(1, math.ceil(len(front) / _LABELS)) == 0:
            lines.append(_say(a - 9, b - 9, str(i + 1), "ink end"))
    if base:
        a, b = place(base)
        lines.append(f'<path class="predicted" d="M{a:.1f} {b - 7:.1f}l7 7l-7 7l-7 -7z"/>'
                     + _say(a + 11, b + 4, plain(base.name, 40), "ink"))  # fmt: skip
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Axis(NamedTuple):
    low: float
    high: float

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Round numbers inside: multiples of 1, 2 and 5 of powers of ten, or closer ones in a short range."""
        for steps in ((1, 2, 5), range(1, 10), [x / 2 for x in range(2, 20)], [x / 10 for x in range(10, 100)]):
            first = math.floor(math.log10(self.low))
            found = [m * 10.0**e for e in range(first, math.ceil(math.log10(self.high)) + 1) for m in steps]
            inside = [t for t in found if self.low <= t <= self.high]
            if len(inside) >= 4:
                break
        return inside


def _axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    room = max((high / low) ** 0.06, 1.05)
    return _Axis(low / room, high * room)


def _tall() -> float:
    return HEIGHT - _TOP - _BOTTOM


def _say(x: float, y: float, text: str, style: str = "soft") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:g}">{text}</text>'
