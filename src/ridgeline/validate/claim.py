"""One published figure beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One published figure beside ours."""

    work: str
    what: str
    theirs: float
    ours: float
    unit: str = ""
    why: str = ""
    """The reason for a difference, or what kind of figure theirs is."""

    @property
    def error(self) -> float:
        """Ours relative to theirs, less 1."""
        return self.ours / self.theirs - 1
