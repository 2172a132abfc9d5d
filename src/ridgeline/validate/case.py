"""One measured number with its prediction: the common form of all schemas of measured data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from ridgeline.predict.interval import Known
from ridgeline.spec.result import Row


@dataclass(slots=True, frozen=True)
class Case:
    """A measured quantity beside its prediction."""

    group: str
    """The line of the error table it belongs to: device and phase, dtype or operation, e.g. ``h100-sxm fp8``."""
    quantity: str
    """What was measured: seconds, tokens_per_s_per_device, bytes, ttft_s, tpot_s …"""
    measured: float
    predicted: float
    label: str
    """Description of the row, for the list of the worst."""
    terms: tuple[float, ...] = (1.0,)
    """Non-negative terms of the trivial baseline, which fits one constant each to the measured data of its group:
    ``(peak seconds of FLOPs, peak seconds of bytes, 1)`` is a three-constant roofline, ``(predicted FLOP time,)`` one
    constant efficiency. All in the quantity's unit; for a rate, terms are of its inverse (see ``inverse``)."""
    inverse: bool = False
    """Whether the baseline is additive in 1/quantity (rates) and not in the quantity itself (times, bytes)."""
    why: str = ""
    """The bound that the prediction states."""
    alternatives: Hashable = None
    """Equal for rows that differ only in their plan; None: no alternatives."""
    better: Literal["lower", "higher"] = "lower"
    spread: float | None = None
    """Relative 68 % error that the prediction states for itself; None: it states none."""
    known: Known | None = None
    """What is known of the prediction beside its operators, behind ``spread``."""
    source: str = ""
    """Where the constants behind the prediction come from: measured profile, open data (then the row may be one of
    those that they were fitted on), or class default."""
    line: int = 0
    """Line of the file."""
    assumed: tuple[tuple[str, str], ...] = ()
    """(column, value) of what the row does not state."""

    @property
    def error(self) -> float:
        """Signed relative error of the prediction; 0.1 is 10 % too high."""
        return self.predicted / self.measured - 1.0


_PASSES = ("forward", "backward", "prefill", "decode")
"""Phases of which operators are told apart by kind."""


def largest_kinds(rows: Iterable[Row], seconds: float | None = None) -> str:
    """What most of the time of ``rows`` goes to, as shares of ``seconds`` (None: of their sum): ``gemm 66%, attention
    22%, norm 4%``."""
    kinds: dict[str, float] = {}
    for row in rows:
        key = row.kind if row.phase in _PASSES else row.operator if row.phase == "other" else row.phase
        kinds[key] = kinds.get(key, 0.0) + (row.seconds if row.exposed_seconds is None else row.exposed_seconds)
    total = seconds or sum(kinds.values())
    first = sorted(kinds.items(), key=lambda kv: -kv[1])[:3]
    return ", ".join(f"{name} {share / total:.0%}" for name, share in first if share)
