"""Result: the one schema for predicted and measured numbers. The pydantic type *is* the file format.

SI units: seconds, bytes, FLOP. A value that is not known is ``None``, never zero.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline.spec.errors import UserError
from ridgeline.spec.notebook import InNotebook

SCHEMA: Literal["ridgeline.result/1"] = "ridgeline.result/1"

Status = Literal["ok", "oom", "error", "timeout", "infeasible", "interrupted"]
PHASES = ("forward", "backward", "optimizer", "communication", "other")
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "buffers", "kv_cache")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")  # a loss may be NaN, which JSON does not have


class Metric(_Record):
    """One number with its unit and, where known, its 95 % interval, spread and sample size."""

    value: float
    unit: str = ""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    n: int | None = None
    """Samples behind the value."""
    better: Literal["lower", "higher", ""] = ""
    source: str = ""
    """Where it came from: "measured", "measured profile", "class default", a formula …"""


class Row(_Record):
    """One line of the breakdown: where time went, by (phase, module, operator, kind)."""

    phase: str
    module: str
    operator: str
    kind: str
    """gemm, attention, softmax, norm, elementwise, embedding, loss, optimizer, collective, copy, unattributed …"""
    seconds: float
    count: float = 1
    """Calls per step."""
    flops: float = 0
    bytes: float = 0
    """Memory traffic."""
    link_bytes: float = 0
    """Bytes sent over a link."""
    bound: str = ""
    """What limits it: compute, memory, launch, link, host; empty when that is not known (measured rows)."""
    spread: float | None = None
    """Relative 68 % error of ``seconds``; None when it is not known."""
    roof: float | None = None
    """Achieved share of the roof (the faster of peak rate and bandwidth), 0–1."""
    exposed_seconds: float | None = None
    """Part of ``seconds`` that is not hidden behind other work; None: all of it."""


class Memory(_Record):
    """Bytes of one category on one device at the instant of peak."""

    category: str
    bytes: float
    device: str = "rank 0"


class Traffic(_Record):
    """What one rank sends in a step (with a pipeline: the mean rank) by one kind of collective among ``ranks``.

    Of a server: in a step of one token, without the messages between stages.
    """

    kind: str
    """all_reduce, all_gather, reduce_scatter, alltoall or p2p."""
    ranks: int
    calls: float
    bytes: float
    """Bytes of the full buffer on one rank: the output of an all-gather, the input of a reduce-scatter."""


class Check(_Record):
    """An identity or bound that was tested: "tokens = rate × time", "same loss as baseline" …"""

    name: str
    passed: bool
    expected: float | None = None
    got: float | None = None
    tolerance: float | None = None
    note: str = ""


class Sample(_Record):
    """One measured optimizer step."""

    step: int
    seconds: float
    tokens: int
    loss: float | None = None
    warmup: bool = False
    repeat: int = 0


class Result(InNotebook, _Record):
    """The result of a plan, predicted or measured, in one schema."""

    schema_: Literal["ridgeline.result/1"] = Field(default=SCHEMA, alias="schema")
    source: Literal["predicted", "measured"]
    experiment_id: str
    name: str = ""
    """Short label of the plan, e.g. "zero2"."""
    experiment: dict[str, Any]
    """The canonical experiment."""
    status: Status = "ok"
    reason: str = ""
    """Why, when ``status`` is not ok."""
    environment: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Metric] = Field(default_factory=dict)
    breakdown: list[Row] = Field(default_factory=list)
    memory: list[Memory] = Field(default_factory=list)
    traffic: list[Traffic] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    losses: list[float] = Field(default_factory=list)
    """Mean loss of every held-out window, nats per token: perplexities are compared window by window."""
    distributions: dict[str, list[float]] = Field(default_factory=dict)
    """Of a served load: latencies at evenly spaced shares of the requests (``itl_s``: of the gaps), from the smallest
    to the largest."""
    checks: list[Check] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    created: str = ""
    """ISO-8601, UTC."""
    command: str = ""
    """The command that reproduces it."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of one rank: the sum over categories; None when memory was not recorded."""
        return sum(m.bytes for m in self.memory) if self.memory else None

    def metric(self, name: str) -> float | None:
        """The value of a metric, or None."""
        m = self.metrics.get(name)
        return None if m is None or not math.isfinite(m.value) else m.value

    def to_json(self, indent: int | None = 2) -> str:
        """The file format."""
        return self.model_dump_json(by_alias=True, indent=indent)

    @classmethod
    def from_json(cls, text: str, where: str = "result") -> Result:
        """Parse the file format. Raises :class:`UserError` naming ``where`` and the first bad field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as e:
            first = e.errors()[0]
            at = ".".join(str(p) for p in first["loc"]) or "top level"
            raise UserError(f"{where} is not a {SCHEMA} document: {at}: {first['msg']}") from None

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{path} cannot be read: {e}") from None
