"""Study files: TOML in, cells out.

::

    name = "mine"
    base = ["mixed_precision"]              # techniques of every plan

    [platforms]                             # short names of clusters
    a800 = "8xa800-80g"

    [plans]                                 # short names of plans
    naive = []
    z3 = ["zero:stage=3"]

    [[tables]]
    name = "pretrain"
    workload = { kind = "pretrain", seq_len = 350 }
    axes = { platform = ["a800"], model = ["llama3.2-1b"], plan = ["naive", "z3"], each = [1, "max"] }
    rows = ["plan"]                         # the other axes are columns or pages
    show = ["tokens_per_s", "peak_bytes"]

    [[findings]]
    says = "Sharding parameters is faster at batch 1"
    reported = "…"
    of = { table = "pretrain", plan = "z3", each = 1 }
    over = { table = "pretrain", plan = "naive", each = 1 }
    low = 1.0

Axes: ``model``, ``platform``, ``plan``; ``devices`` replaces the platform's number of devices; ``each`` is the number
of sequences per device, ``"max"`` the largest that fits; ``system`` is a system of the catalog on its own model and
cluster; any other axis is a field of the workload (``rate``, ``concurrency``, ``engine``, …). A table with ``operator``
holds single operators (see :mod:`ridgeline.study.operators`) by ``platform`` and size.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline import catalog
from ridgeline.experiments import plan_of
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.study import Axis
from ridgeline.spec.workload import WORKLOADS
from ridgeline.study.operators import Operator
from ridgeline.techniques.cards import classes
from ridgeline.techniques.registry import techniques_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN = ("model", "platform", "plan", "devices", "each", "system")
EVERY = "every technique"
"""As the value of ``plan``: the task's techniques one by one, at their example options."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TableFile(_Table):
    """One ``[[tables]]`` of a file."""

    name: str
    title: str = ""
    workload: dict[str, Any] = Field(default_factory=dict)
    axes: dict[str, list[Axis]]
    base: list[str] | None = None
    """Techniques of every plan of this table; None: the file's."""
    rows: list[str]
    columns: str = ""
    show: list[str] = ["tokens_per_s", "peak_bytes"]
    parts: Literal["", "phase", "module"] = ""
    cdf: Literal["", "ttft", "tpot", "e2e"] = ""
    """The latency of serving whose distribution over the requests the report draws."""
    operator: Operator | None = None
    """The cells are single operators; axes then give their sizes."""
    beyond_memory: bool = False
    """Show what plans that do not fit would give if memory sufficed."""
    claims: bool = False
    """Show the claim of each technique's or system's paper, and the first row's value as 1."""
    note: str = ""

    @property
    def pages(self) -> list[str]:
        """The axes that are neither rows nor columns: one part of the table for each of their values."""
        return [axis for axis in self.axes if axis not in (*self.rows, self.columns)]


class FindingFile(_Table):
    """One ``[[findings]]`` of a file: factor · Π of / Π over of one metric lies between ``low`` and ``high``."""

    says: str
    reported: str
    of: list[dict[str, Axis]] | dict[str, Axis]
    over: list[dict[str, Axis]] | dict[str, Axis] = []
    metric: str = "tokens_per_s"
    """A metric, or ``parts:NAME`` for the seconds of a part."""
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    note: str = ""
    """Why the value comes out as it does, where it disagrees."""


class StudyFile(_Table):
    """A study as written in its file."""

    name: str
    title: str = ""
    source: str = ""
    base: list[str] = []
    platforms: dict[str, str] = {}
    plans: dict[str, list[str]] = {}
    tables: list[TableFile] = Field(min_length=1)
    findings: list[FindingFile] = []

    def cells(self, table: TableFile) -> Iterator[dict[str, Axis]]:
        """The points of a table's cells on its axes."""
        axes = {name: self._values(table, name, values) for name, values in table.axes.items()}
        for place in itertools.product(*axes.values()):
            yield dict(zip(axes, place, strict=True))

    def _values(self, table: TableFile, name: str, values: list[Axis]) -> list[Axis]:
        if name == "system" and values == ["all"]:
            return list(catalog.systems())
        if name == "plan" and EVERY in values:
            task = table.workload.get("kind", "pretrain")
            every = [t.card.name for t in classes() if task in t.card.tasks]
            return [v for v in values if v != EVERY] + every
        return values

    def plan(self, name: str) -> list[str]:
        """The techniques of a named plan, or the system or technique of that name."""
        return self.plans.get(name, [name])


def load_study(path: Path) -> StudyFile:
    """The study of a TOML file. Raises :class:`UserError` naming what is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"no study file at {path}", "give the path of a TOML file; studies/ holds some") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid TOML: {e}") from None
    try:
        study = StudyFile.model_validate({"name": path.stem, **table})
    except ValidationError as e:
        if "model" in table and "tables" not in table:
            raise UserError(f"{path} is an experiment, not a study",
                            "`ridgeline ablate` or `ridgeline bench` takes it") from None  # fmt: skip
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}", "see docs/study.md") from None
    for t in study.tables:
        for axis in (*t.rows, *([t.columns] if t.columns else [])):
            if axis not in t.axes:
                raise unknown("axis", axis, t.axes, f"{path}, table {t.name!r}")
        _check_names(study, t, f"{path}, table {t.name!r}")
    names = [t.name for t in study.tables]
    for finding in study.findings:
        for place in places(finding.of) + places(finding.over):
            if place.get("table") not in names:
                raise unknown("table", str(place.get("table")), names, f"{path}, finding {finding.says!r}")
            cells = (at for t in study.tables if t.name == place["table"] for at in study.cells(t))
            require_one(finding.says, place, [at for at in cells if stands_at(at, place)])
    return study


def _check_names(study: StudyFile, t: TableFile, where: str) -> None:
    """Raise :class:`UserError` for a platform, model, technique, option or key that does not exist: what is written
    wrong is a mistake, not the result of a cell."""
    for name in t.axes.get("platform", []):
        catalog.cluster(study.platforms.get(str(name), str(name)))
    for name in [*t.axes.get("model", []), *([t.workload["model"]] if "model" in t.workload else [])]:
        catalog.model(str(name))
    base = study.base if t.base is None else t.base
    for name in t.axes.get("plan", []):
        if name != EVERY:
            techniques_of(plan_of([*base, *filter(None, study.plan(str(name)))]))
    kind = str(t.workload.get("kind", "pretrain"))
    if kind not in WORKLOADS:
        raise unknown("kind", kind, WORKLOADS, where)
    for key in () if t.operator is not None else {*t.workload, *t.axes} - {*OWN, "kind"}:
        if key not in WORKLOADS[kind].model_fields:
            raise unknown("key", key, WORKLOADS[kind].model_fields, where)


def stands_at(axes: dict[str, Axis], place: dict[str, Axis]) -> bool:
    """Whether a cell's point is the one that a finding names."""
    return all(axes.get(k) == v for k, v in place.items() if k != "table")


def require_one(says: str, place: dict[str, Axis], found: Sequence[object]) -> None:
    """Raise :class:`UserError` unless a finding names one cell."""
    if len(found) != 1:
        raise UserError(f"finding {says!r} names {json.dumps(place)}, which {len(found)} cells are", "name every axis")


def places(given: list[dict[str, Axis]] | dict[str, Axis]) -> list[dict[str, Axis]]:
    """One place or several, as a list."""
    return [given] if isinstance(given, dict) else given
