"""Experiment files: TOML in and out, dotted overrides, and the several plans of an ablation.

::

    name = "quickstart"
    model = "llama-tiny"            # a catalog name, a config.json, a checkpoint directory, or a table
    on = "local"                    # a cluster: NAME, 8xNAME or 4x8xNAME
    plan = ["flash_attention", "zero:stage=2"]  # techniques, or a system of the literature: ["megatron_ptdp"]

    [workload]
    kind = "pretrain"               # and its fields; see ridgeline.spec.workload
    seq_len = 256

    [plans]                         # instead of `plan`: an ablation
    baseline = []
    zero2 = { with = ["zero:stage=2"], on = "2xlocal" }
    lora = { with = ["lora"], workload = { lr = 2e-4 } }  # each method at its own learning rate

    [measure]
    repeats = 2
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline import catalog
from ridgeline.predict.settle import settled
from ridgeline.report.files import write_atomic
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan, scalar
from ridgeline.spec.system import merged
from ridgeline.spec.workload import WORKLOADS
from ridgeline.techniques.registry import registry, techniques_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", bound=BaseModel)
_TOP = {"name", "model", "on", "plan", "workload", "plans", "measure"}


class MeasureOptions(BaseModel):
    """How an ablation or benchmark measures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeats: int = Field(default=2, ge=1)
    """Processes per plan; the order of plans is reversed every other round (ABBA)."""
    baseline: str = ""
    """The plan that the others are compared with; default: the first."""
    margin: float = Field(default=0.02, ge=0)
    """A speed-up within this share of 1 counts as no difference."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Timeout of one cell in seconds."""
    memory: bool = True
    """Record memory by category in one extra step of each plan's first process."""
    warm_start: int = Field(default=0, ge=0)
    """Steps of plain training of one common checkpoint that every plan starts from; 0: random weights. Adapters need
    it: on a random base they have nothing to adapt."""
    warm_start_data: str = ""
    """Text of the warm start; default: the workload's own."""
    warm_start_workload: dict[str, Any] = {}
    """Other fields of the warm start's pre-training (batch_size, lr, …); default: the workload's own, if it trains."""


class AblationSpec(BaseModel):
    """Several plans of one experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    plans: dict[str, Experiment]
    """Normalized and checked experiments by plan name, in file order."""
    measure: MeasureOptions

    @property
    def baseline(self) -> str:
        """Name of the plan the others are compared with."""
        return self.measure.baseline or next(iter(self.plans))


def make(
    model: str | dict[str, Any] | ModelSpec,
    on: str | Cluster,
    workload: dict[str, Any],
    plan: list[Any],
    name: str = "",
    where: str = "command line",
) -> Experiment:
    """Resolve names and build a normalized, settled and checked experiment.

    Raises :class:`UserError` naming what is wrong.
    """
    for key, value in (("on", on), ("name", name)):
        if not isinstance(value, str) and not (key == "on" and isinstance(value, Cluster)):
            raise UserError(f"{where}: {key} = {value!r} is not a string", f'put it in quotes: {key} = "{value}"')
    if not isinstance(plan, (list, tuple)):
        raise UserError(f"{where}: plan = {plan!r} is not a list of techniques", f'write plan = ["{plan}"]')
    parsed = plan_of(plan, where)
    techniques_of(parsed)  # misspelt names come before anything that depends on the machine
    spec = _model(model, where)
    if spec.num_experts:
        parsed = plan_of(plan, where, mixture=True)
    e = Experiment(
        model=spec,
        workload=_workload(workload, where),
        cluster=on if isinstance(on, Cluster) else catalog.cluster(on),
        plan=parsed,
        name=name,
    )
    return settled(e)


def plan_of(items: list[Any] | tuple[Any, ...], where: str = "plan", mixture: bool = False) -> Plan:
    """The plan of technique calls and of names of systems, which stand for their techniques; some have more of them for
    a ``mixture`` of experts.

    A technique that is named beside a system overrides that system's options of it, one by one. Raises
    :class:`UserError` for a name that is neither (with the nearest ones), and for systems that disagree.
    """
    own = Plan.parse(items, where)
    known = registry()
    for call in own.calls:
        if call.name not in known and call.name not in catalog.systems():
            raise unknown("technique", call.name, [*known, *catalog.systems()], "plan")
    named = [call for call in own.calls if call.name not in known]
    if not named:
        return own
    return merged(own, [(call, catalog.system(call.name).expand(call.options, mixture)) for call in named])


def reported_workload(model: str, on: str, task: str, plan: list[str]) -> dict[str, Any]:
    """The workload that a system in ``plan`` reports of this very model and cluster, without its kind; else none."""
    for name in (item.partition(":")[0].strip() for item in plan):
        if name in catalog.systems():
            reported = catalog.system(name).reported
            theirs = (reported.model, catalog.cluster(reported.on).label)
            same = (catalog.model(model).name, catalog.cluster(on).label) == theirs
            if same and reported.workload.get("kind", "pretrain") == task:
                return {k: v for k, v in reported.workload.items() if k != "kind"}
    return {}


def read(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The raw table of an experiment file after dotted ``key=value`` overrides."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no experiment file at {file}", "give the path of a TOML file; examples/ holds some")
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{file} is not valid TOML: {e}") from None
    for item in overrides or []:
        _override(table, item)
    for key in table:
        if key not in _TOP:
            raise unknown("key", key, _TOP, str(file))
    return table


def load(path: str | Path, overrides: list[str] | None = None) -> Experiment:
    """One experiment from a file. A file with several ``plans`` is an ablation: :func:`load_ablation`."""
    table = read(path, overrides)
    if "plans" in table:
        names = ", ".join(table["plans"])
        raise UserError(
            f"{path} holds several plans ({names})", "use `ridgeline ablate`, or choose one with --plan NAME"
        )
    return _one(table, table.get("plan", []), table.get("on", "local"), table.get("name", Path(path).stem), str(path))


def load_plan(path: str | Path, name: str, overrides: list[str] | None = None) -> Experiment:
    """One named plan of an ablation file."""
    table = read(path, overrides)
    plans = _plans(table, str(path))
    if name not in plans:
        raise unknown("plan", name, plans, str(path))
    return _named(table, name, plans[name], str(path))


def load_ablation(path: str | Path, overrides: list[str] | None = None) -> AblationSpec:
    """All plans of a file (a single ``plan`` is an ablation of one against the empty plan)."""
    table = read(path, overrides)
    where = str(path)
    raw = _plans(table, where)
    measure = table.get("measure", {})
    if not isinstance(measure, dict):
        raise UserError(f"{where}: measure is not a table", "[measure] with repeats = 2")
    options = _validate(MeasureOptions, measure, f"{where} [measure]")
    if options.baseline and options.baseline not in raw:
        raise unknown("baseline plan", options.baseline, raw, f"{where} [measure]")
    plans = {name: _named(table, name, entry, where) for name, entry in raw.items()}
    return AblationSpec(name=table.get("name", Path(path).stem), plans=plans, measure=options)


def _plans(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The raw plans of a file by name."""
    raw = table.get("plans")
    if raw is None:
        raw = {"baseline": [], "plan": table["plan"]} if table.get("plan") else {"baseline": []}
    if not isinstance(raw, dict) or not raw:
        raise UserError(f"{where}: [plans] is empty", 'write e.g.  baseline = []  and  zero2 = ["zero:stage=2"]')
    return raw


def _named(table: dict[str, Any], name: str, entry: Any, where: str) -> Experiment:
    """The experiment of one raw plan: a list of techniques, or a table of techniques, cluster and own workload
    fields."""
    spot = f"{where} [plans] {name}"
    on = table.get("on", "local")
    if isinstance(entry, dict):
        for key in entry:
            if key not in ("with", "on", "workload"):
                raise unknown("key", key, ("with", "on", "workload"), spot)
        own = entry.get("workload", {})
        if not isinstance(own, dict):
            raise UserError(f"{spot}: workload is not a table", "write workload = { lr = 2e-4 }")
        table = {**table, "workload": {**table.get("workload", {}), **own}}
        on, entry = entry.get("on", on), entry.get("with", [])
    if not isinstance(entry, list):
        raise UserError(f"{spot}: {entry!r} is not a list of techniques", 'write ["zero:stage=2"]')
    return _one(table, entry, on, name, spot)


def save(e: Experiment, path: Path) -> Path:
    """Write a file that :func:`load` reads back to the same experiment, and beside it one for every device that the
    catalog does not know."""
    on = []
    for part in e.cluster.parts or (e.cluster,):
        label = part.label
        if not _known(part.device):
            text = catalog.device_toml(part.device)
            file = write_atomic(_device_file(part.device.name, text, path), text)
            label = f"{label.removesuffix(part.device.name)}{file}"
        on.append(label)
    return write_atomic(path, to_toml(e, "+".join(on)))


def _device_file(name: str, text: str, plan: Path) -> Path:
    """The absolute path of a device's file beside ``plan``: numbered where its name is taken by other contents."""
    folder = plan.parent.resolve()
    files = (folder / (f"{name}.toml" if i == 1 else f"{name}-{i}.toml") for i in itertools.count(1))
    taken = folder / plan.name
    return next(f for f in files if f != taken and (not f.is_file() or f.read_bytes() == text.encode()))


def _known(device: Device) -> bool:
    try:
        return catalog.device(device.name) == device
    except UserError:
        return False


def to_toml(e: Experiment, on: str = "") -> str:
    """The text of a file that :func:`load` reads back to the same experiment, on devices that are found by name, or in
    ``on``."""
    known = set(catalog.models())
    model: Any = e.model.name
    if e.model.name not in known or catalog.model(e.model.name) != e.model:
        model = e.model.model_dump(exclude_none=True, exclude_defaults=True)
    table = {
        "name": e.name or e.id,
        "model": model,
        "on": on or e.cluster.label,
        "plan": e.plan.strings(),
        "workload": e.workload.model_dump(exclude_none=True),
    }
    return tomli_w.dumps(table)


def _one(table: dict[str, Any], plan: list[Any], on: str, name: str, where: str) -> Experiment:
    if "model" not in table:
        raise UserError(f"{where}: no model", 'add model = "llama-tiny" (see `ridgeline models`)')
    workload = table.get("workload", {})
    if not isinstance(workload, dict):
        raise UserError(f"{where}: workload is not a table", '[workload] with kind = "pretrain"')
    return make(table["model"], on, workload, plan, name, where)


def _model(value: Any, where: str) -> ModelSpec:
    if isinstance(value, ModelSpec):
        return value
    if isinstance(value, str):
        return catalog.model(value)
    if not isinstance(value, dict):
        raise UserError(f"{where}: model = {value!r} is neither a name nor a table")
    fields = dict(value)
    base = fields.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{where} [model]: base = {base!r} is not a model's name", "see `ridgeline models`")
    for key in fields:
        if key not in ModelSpec.model_fields:
            raise unknown("key", key, [*ModelSpec.model_fields, "base"], f"{where} [model]")
    if base is None:
        return _validate(ModelSpec, fields, f"{where} [model]")
    start = catalog.model(base).model_dump()
    start.update(published_parameters=None, name=fields.get("name", f"{base}*" if fields else base))
    return _validate(ModelSpec, {**start, **fields}, f"{where} [model]")


def _workload(value: dict[str, Any], where: str) -> BaseModel:
    fields = dict(value)
    kind = str(fields.pop("kind", "pretrain"))
    if kind not in WORKLOADS:
        raise unknown("task", kind, WORKLOADS, where)
    return _validate(WORKLOADS[kind], fields, f"{where} [workload]")


def _validate(cls: type[T], fields: dict[str, Any], where: str) -> T:
    known = {k for k in cls.model_fields if k != "kind"}
    for key in fields:
        if key not in known:
            raise unknown("key", key, known, where)
    try:
        return cls(**fields)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(p) for p in first["loc"]) or "value"
        given = f" = {first['input']!r}" if first["loc"] and not isinstance(first["input"], dict) else ""
        raise UserError(f"{where}: {key}{given} is not valid: {first['msg'].removeprefix('Value error, ')}") from None


def _override(table: dict[str, Any], item: str) -> None:
    key, eq, text = item.partition("=")
    if not eq or not key.strip():
        raise UserError(f"override {item!r} is not key=value", "write e.g. workload.steps=40")
    value: Any
    try:
        value = tomllib.loads(f"x = {text}")["x"]  # lists, quoted strings, numbers
    except tomllib.TOMLDecodeError:
        value = scalar(text)
    path = key.strip().split(".")
    at = table
    for i, part in enumerate(path[:-1]):
        inner = at.setdefault(part, {})
        if not isinstance(inner, dict):
            if path[: i + 1] == ["model"]:
                inner = at["model"] = {"base": inner}
            else:
                raise UserError(f"override {item!r}: {'.'.join(path[: i + 1])} is not a table")
        at = inner
    at[path[-1]] = value
