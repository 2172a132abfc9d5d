"""A study: many experiments over axes, the tables they are shown in, and findings that are checked on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridgeline.spec.errors import UserError
from ridgeline.spec.notebook import InNotebook

Axis = str | int | float
Verdict = Literal["agrees", "disagrees", "not known"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")


class StudyCell(_Record):
    """One experiment of a table: its point on the axes, and its results."""

    table: str
    axes: dict[str, Axis]
    plan: list[str] = Field(default_factory=list)
    """The settled plan in ``name:option=value`` form, without defaults."""
    batch_size: int | None = None
    status: str = "ok"
    """ok, infeasible (does not fit), refused (by a check), oom, error, …"""
    reason: str = ""
    predicted: dict[str, float] = Field(default_factory=dict)
    """Metrics in SI units."""
    measured: dict[str, float] = Field(default_factory=dict)
    measured_status: str = ""
    """Empty if it was not measured."""
    measured_reason: str = ""
    parts: dict[str, float] = Field(default_factory=dict)
    """Predicted seconds of a step by part, where the table asks for them."""
    measured_parts: dict[str, float] = Field(default_factory=dict)
    latencies: list[float] = Field(default_factory=list)
    """Predicted seconds of a request at evenly spaced shares of the requests, where the table asks for them."""
    measured_latencies: list[float] = Field(default_factory=list)
    command: str = ""
    """The command line that predicts it."""
    claim: str = ""
    """What the paper of its technique or system claims, where the table shows it."""


class StudyTable(_Record):
    """How the cells of one table are laid out."""

    name: str
    title: str
    rows: list[str]
    columns: str = ""
    pages: list[str] = Field(default_factory=list)
    show: list[str]
    """Metrics of a cell."""
    parts: Literal["", "phase", "module"] = ""
    cdf: Literal["", "ttft", "tpot", "e2e"] = ""
    beyond_memory: bool = False
    claims: bool = False
    note: str = ""


class StudyFinding(_Record):
    """A finding of the paper, beside the values here."""

    says: str
    reported: str
    predicted: float | None = None
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    """The values that agree with the paper."""
    verdict: Verdict = "not known"
    measured_verdict: Verdict = "not known"
    note: str = ""


class Study(InNotebook, _Record):
    """The result of ``ridgeline study``, for reports and the store."""

    schema_: Literal["ridgeline.study/1"] = Field(default="ridgeline.study/1", alias="schema")
    id: str
    name: str
    title: str = ""
    source: str = ""
    """The paper or system that it reproduces."""
    tables: list[StudyTable]
    cells: list[StudyCell]
    findings: list[StudyFinding] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    created: str = ""
    """ISO-8601, UTC."""
    command: str = ""
    seconds: float = 0.0
    """Wall time of the run."""

    @classmethod
    def load(cls, path: Path) -> Study:
        """Read a study file. Raises :class:`UserError` for one that is not usable."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"{path} is not a readable study: {str(e).splitlines()[0]}") from None

    def to_json(self, indent: int | None = 2) -> str:
        """The file format."""
        return self.model_dump_json(by_alias=True, indent=indent)
