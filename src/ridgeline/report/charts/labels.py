"""Where to write the name of each dot so that names cover neither dots nor one another."""

from __future__ import annotations

from collections.abc import Sequence

SIDES = (
    ("middle right", 1, 0), ("middle left", -1, 0), ("top center", 0, 1), ("bottom center", 0, -1),
    ("top right", 1, 1), ("bottom right", 1, -1), ("top left", -1, 1), ("bottom left", -1, -1),
)  # fmt: skip
CHAR, LINE, DOT = 7.0, 15.0, 8.0
"""Pixels of a character, a line of text, and half a dot with its margin."""

Box = tuple[float, float, float, float]


def positions(points: Sequence[tuple[float, float]], texts: Sequence[str], width: float, height: float) -> list[str]:
    """A figure's ``textposition`` per point, chosen greedily. ``points`` lie in the unit square, ``width`` × ``height``
    is the plot in pixels.
    """
    dots = [(x * width, y * height) for x, y in points]
    taken: list[Box] = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in dots]
    out = []
    for (x, y), text in zip(dots, texts, strict=True):
        if not text:
            out.append(SIDES[0][0])
            continue
        side, box = min(
            ((name, _box(x, y, dx, dy, len(text) * CHAR)) for name, dx, dy in SIDES),
            key=lambda option: _cost(option[1], taken, width, height),
        )
        taken.append(box)
        out.append(side)
    return out


def _box(x: float, y: float, dx: int, dy: int, length: float) -> Box:
    left = x + DOT if dx > 0 else x - DOT - length if dx < 0 else x - length / 2
    low = y + DOT if dy > 0 else y - DOT - LINE if dy < 0 else y - LINE / 2
    return left, low, left + length, low + LINE


def _cost(box: Box, taken: list[Box], width: float, height: float) -> float:
    """Area covered of others, plus area outside the plot; the order of ``SIDES`` breaks ties."""
    inside = _overlap(box, (0, 0, width, height))
    outside = (box[2] - box[0]) * (box[3] - box[1]) - inside
    return sum(_overlap(box, other) for other in taken) + 4 * outside


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
