"""System: a published training or serving system as a named plan, with what its paper reports."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call, Plan


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Reported(_Data):
    """The paper's own model and cluster, and its reported number."""

    model: str
    """Catalog name."""
    on: str
    """Cluster, as ``--on`` takes it."""
    workload: dict[str, Any]
    """Fields of the workload; ``kind`` is pretrain unless given."""
    says: str
    """The paper's statement, and how our model of it differs."""
    quantity: Literal["", "hfu", "states_bytes", "speedup", "tokens_per_s"] = ""
    """hfu: share of the device's peak, recomputation counted; states_bytes: parameters, gradients and optimizer states
    of one rank, at rest; speedup: tokens/s over those of the plan ``against``; tokens_per_s. Empty: nothing
    that can be compared."""
    value: float = Field(default=0.0, ge=0)
    """The paper's number, in SI units."""
    apart: float = Field(default=1.0, gt=0)
    """Ratio of our counting to the paper's; ``says`` has the reason."""
    against: list[str] = []
    """The plan that ``speedup`` compares with."""

    @model_validator(mode="after")
    def _complete(self) -> Reported:
        if bool(self.quantity) != bool(self.value) or (self.quantity == "speedup") != bool(self.against):
            raise ValueError("a quantity needs a value, and speedup a plan to be against")
        return self


class Shrunk(_Data):
    """The same system on a few ranks, where it can be run."""

    ranks: int = Field(ge=1)
    plan: list[str]
    """Technique calls."""
    mixture: list[str] = []
    """Additional calls for a mixture of experts."""
    note: str = ""
    """What was left out, and why."""


class System(_Data):
    """A system of the literature: a name for its combination of techniques."""

    name: str
    title: str
    paper: str
    """arXiv id."""
    taxonomy: str
    claim: str
    """The paper's headline."""
    summary: str
    plan: list[str]
    """Technique calls, with the degrees of the paper's cluster."""
    mixture: list[str] = []
    """Additional calls for a mixture of experts."""
    reported: Reported
    shrunk: Shrunk

    def expand(self, options: dict[str, Any], mixture: bool = False) -> Plan:
        """Its techniques: the paper's, or with ``ranks=N`` those of the shrunk plan; for a ``mixture`` of experts with
        those that it has for such.

        Raises :class:`UserError` for another option or another number of ranks.
        """
        for key in options:
            if key != "ranks":
                raise UserError(
                    f"system {self.name!r} has no option {key!r}",
                    f"write {self.name}, {self.name}:ranks={self.shrunk.ranks}, or override one of its techniques:"
                    f" --with {self.name} --with {self.plan[0]}",
                )
        ranks = options.get("ranks")
        if ranks is not None and ranks != self.shrunk.ranks:
            raise UserError(
                f"system {self.name!r} has a small plan for {self.shrunk.ranks} ranks, not for {ranks}",
                f"use {self.name}:ranks={self.shrunk.ranks}, or {self.name} with degrees of your own",
            )
        source = self if ranks is None else self.shrunk
        return Plan.parse([*source.plan, *(source.mixture if mixture else [])], f"system {self.name}")


def merged(own: Plan, expanded: list[tuple[Call, Plan]]) -> Plan:
    """The techniques of several systems, overridden option by option by those that ``own`` names itself.

    Raises :class:`UserError` when two systems want a technique with unlike options that ``own`` does not settle.
    """
    found: dict[str, Call] = {}
    source: dict[str, str] = {}
    for system, plan in expanded:
        for call in plan.calls:
            if call.name in found and found[call.name] != call and not own.has(call.name):
                raise UserError(
                    f"systems {source[call.name]!r} and {system.name!r} disagree: {found[call.name]} and {call}",
                    f"keep one of them, or say which: --with {call}",
                )
            found.setdefault(call.name, call)
            source.setdefault(call.name, system.name)
    systems = set(source.values()) | {call.name for call, _ in expanded}
    for call in own.calls:
        if call.name not in systems:
            base = found[call.name].options if call.name in found else {}
            found[call.name] = Call(name=call.name, options={**base, **call.options})
    return Plan(calls=tuple(found.values()))
