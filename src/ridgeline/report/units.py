"""Human-readable numbers. Files keep SI units and whole bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

NONE = "–"
"""The cell of an unknown value."""


class Scale(NamedTuple):
    """One unit for a whole column: a value divided by ``factor`` is in ``label``."""

    factor: float
    label: str

    def say(self, value: float | None, digits: int = 3) -> str:
        """The value in this unit, without the label."""
        return NONE if value is None else number(value / self.factor, digits)


TIMES = (Scale(1, "s"), Scale(1e-3, "ms"), Scale(1e-6, "µs"), Scale(1e-9, "ns"))
SIZES = (Scale(2**40, "TiB"), Scale(2**30, "GiB"), Scale(2**20, "MiB"), Scale(2**10, "KiB"), Scale(1, "B"))
COUNTS = (Scale(1e15, "P"), Scale(1e12, "T"), Scale(1e9, "G"), Scale(1e6, "M"), Scale(1e3, "k"), Scale(1, ""))


def scale(values: Iterable[float | None], steps: tuple[Scale, ...]) -> Scale:
    """The unit in which the largest value is at least one."""
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    if not largest:
        return next(s for s in steps if s.factor == 1)
    return next((s for s in steps if largest >= s.factor), steps[-1])


def number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits, never in exponent form between 0.001 and a million."""
    if not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def seconds(value: float | None) -> str:
    """412 ms."""
    return _with_unit(value, TIMES)


def size(value: float | None) -> str:
    """1.23 GiB (2³⁰)."""
    return _with_unit(value, SIZES)


def count(value: float | None, unit: str = "") -> str:
    """12.3 G, 12.3 GFLOP, 12.3 kFLOP/s …: powers of ten."""
    if value is None:
        return NONE
    s = scale([value], COUNTS)
    return f"{s.say(value)} {s.label}{unit}".rstrip()


def percent(share: float | None, signed: bool = False) -> str:
    """4.2 %; ``signed`` for a change."""
    if share is None or not math.isfinite(share):
        return NONE
    places = 0 if abs(share) >= 1 else 1
    return f"{100 * share:{'+' if signed else ''}.{places}f} %"


def times(ratio: float | None) -> str:
    """1.42×."""
    return NONE if ratio is None else f"{number(ratio)}×"


def metric(value: float | None, unit: str) -> str:
    """A value in its SI unit, human-readable."""
    if value is None or not math.isfinite(value):
        return NONE
    if unit == "s":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    if unit.startswith("tokens") and abs(value) >= 1000:
        s = scale([value], COUNTS)
        return f"{s.say(value)}{s.label} {unit}"
    text = f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else number(value)
    if not unit and abs(value) >= 1e6:
        return count(value)
    return f"{text} {unit}".rstrip()


def _with_unit(value: float | None, steps: tuple[Scale, ...]) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    s = scale([value], steps)
    return f"{s.say(value)} {s.label}"
