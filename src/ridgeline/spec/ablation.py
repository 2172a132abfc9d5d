"""Ablation: one experiment, several plans, predicted and measured side by side, each against the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridgeline.spec.errors import UserError
from ridgeline.spec.notebook import InNotebook
from ridgeline.spec.result import Check, Metric, Result

Verdict = Literal["faster", "slower", "no difference", "baseline", "failed"]


NOISY = 1.5
"""An interval of a speed-up whose ends differ by this factor allows no verdict."""


@dataclass(frozen=True)
class CellRef:
    """One measured process of one plan of an ablation."""

    plan: str
    repeat: int


class Outcome(BaseModel):
    """One plan of an ablation."""

    model_config = ConfigDict(extra="forbid")

    name: str
    plan: list[str]
    """Techniques in ``name:option=value`` form."""
    predicted: Result | None = None
    measured: Result | None = None
    speedup: Metric | None = None
    """Measured tokens/s over the baseline's, with the 95 % interval of the ratio."""
    predicted_speedup: float | None = None
    memory_ratio: float | None = None
    """Measured peak bytes over the baseline's."""
    perplexity_ratio: Metric | None = None
    """Measured perplexity over the baseline's on the same windows, with the 95 % interval of the paired ratio."""
    verdict: Verdict = "failed"
    checks: list[Check] = Field(default_factory=list)
    """Sameness of the loss against the baseline, per the cards of the techniques."""

    @property
    def too_noisy(self) -> bool:
        """Whether the interval of the speed-up is too wide for a verdict."""
        s = self.speedup
        known = self.verdict != "baseline" and s is not None and s.low is not None and s.high is not None
        return known and not s.high < NOISY * s.low  # type: ignore[union-attr,operator]


class Ablation(InNotebook, BaseModel):
    """The outcome of ``ridgeline ablate``: what the report draws and the store keeps."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")

    schema_: Literal["ridgeline.ablation/1"] = Field(default="ridgeline.ablation/1", alias="schema")
    id: str
    name: str
    baseline: str
    outcomes: list[Outcome]
    environment: dict[str, Any] = Field(default_factory=dict)
    created: str = ""
    command: str = ""
    notes: list[str] = Field(default_factory=list)

    def to_json(self, indent: int | None = 2) -> str:
        """The file format."""
        return self.model_dump_json(by_alias=True, indent=indent)

    @classmethod
    def load(cls, path: Path) -> Ablation:
        """Read an ablation file. Raises :class:`UserError` when it is not one."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as e:
            raise UserError(f"{path} is not a ridgeline.ablation/1 document: {str(e).splitlines()[0]}") from None
