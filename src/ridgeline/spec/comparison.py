"""Two results side by side, as data; :func:`ridgeline.measure.compare.compare` makes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ComparisonKind = Literal["measured vs measured", "predicted vs predicted", "prediction residual"]
Judgement = Literal["faster", "slower", "better", "worse", "no difference", "no interval", "residual", ""]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Difference(_Record):
    """One key of the environment that is not the same."""

    key: str
    a: str
    b: str


class MetricChange(_Record):
    """One metric in both results. ``ratio`` is b / a, with its 95 % interval where both sides carry a spread."""

    name: str
    unit: str = ""
    a: float | None = None
    b: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Judgement = ""
    """About b against a."""


class RowChange(_Record):
    """Seconds of one breakdown row; a row that one side lacks counts as zero there."""

    phase: str
    module: str
    operator: str
    kind: str
    a_seconds: float
    b_seconds: float


class MemoryChange(_Record):
    """Bytes of one category."""

    category: str
    a_bytes: float
    b_bytes: float


class Comparison(_Record):
    """b against a. In a ``prediction residual`` a is the prediction and b the measurement, whatever was asked."""

    a: str
    b: str
    kind: ComparisonKind
    metrics: list[MetricChange] = Field(default_factory=list)
    movers: list[RowChange] = Field(default_factory=list)
    """Breakdown rows by how far they moved, furthest first."""
    memory: list[MemoryChange] = Field(default_factory=list)
    differences: list[Difference] = Field(default_factory=list)
    """What differs between the two environments."""
    flagged: bool = False
    """The environments are unlike and the comparison was forced."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Of b."""
    commands: list[str] = Field(default_factory=list)
    """Those that reproduce a and b."""
    notes: list[str] = Field(default_factory=list)
