"""A plan as the page describes it, and the answer about it."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ridgeline import catalog, experiments
from ridgeline.catalog.toml import device_from
from ridgeline.predict import predict, predict_trace
from ridgeline.predict.explain import TimePart, headline, tree
from ridgeline.predict.step.streams import StreamEvent
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.result import Result
from ridgeline.techniques.registry import brief, check, normalize, registry, techniques_of
from ridgeline.web.chips import PREFIX, chip_answer, chip_cluster

EVENTS = 1200
"""Bars of a timeline at most; neighbors of the same phase are drawn as one."""
LONGEST = 200
"""Characters of a cluster's name at most."""
LAYERS = 1000
"""Layers of a pasted model at most: each has operators of its own."""
FILES = ("data", "eval_data", "checkpoint", "tokenizer", "template", "trace")
"""Fields of workloads that name files: the page cannot give them."""


class PlanRequest(BaseModel):
    """Model, machine, work and techniques."""

    model_config = ConfigDict(extra="forbid")

    model: str | dict[str, Any]
    """A catalog name, a Hugging Face id, or a ``config.json``."""
    on: str
    device: dict[str, float] = Field(default_factory=dict)
    """Changed figures of the device, or of the chip that makes it, by dotted field: ``{"link.bandwidth": 50e9}``."""
    workload: dict[str, Any]
    plan: list[str] = Field(default_factory=list)


def model_of(model: str | dict[str, Any]) -> ModelSpec:
    """The catalog's model, or that of a ``config.json``. Raises :class:`UserError` for anything else."""
    if isinstance(model, dict):
        spec = ModelSpec.from_config(model, str(model.get("_name_or_path") or "pasted model"))
        if spec.num_layers > LAYERS:
            raise UserError(f"the page takes models of up to {LAYERS} layers, not {spec.num_layers}", "use fewer")
        return spec
    return catalog.model(model, files=False)  # a path would read this machine's files


def cluster_of(on: str, changes: dict[str, float]) -> Cluster:
    """A catalog cluster, or one with a changed copy of its device."""
    if any(c in on for c in ("/", "\\", "~", ".toml")) or (len(on) > LONGEST and PREFIX not in on):
        raise UserError(f"{on[:LONGEST]!r} is not in the catalog", "choose a device and change its figures")
    if PREFIX in on:
        return chip_cluster(on, changes)
    cluster = catalog.cluster(on)
    if not changes:
        return cluster
    table = cluster.device.model_dump(exclude_none=True)
    for path, value in changes.items():
        *outer, last = path.split(".")
        inside: Any = table
        for key in outer:
            inside = inside.get(key) if isinstance(inside, dict) else None
        own = inside.get(last) if isinstance(inside, dict) else None
        if not isinstance(own, (int, float)):
            raise UserError(f"{cluster.device.name} has no figure {path!r}", "change one of those shown")
        if not math.isfinite(value):
            raise UserError(f"{path} is {value}", "give a finite number")
        inside[last] = type(own)(value)
    table["name"] = f"{cluster.device.name}*"
    return cluster.model_copy(update={"device": device_from(table, "the changed device")})


def experiment_of(request: PlanRequest, on: Cluster | None = None) -> Experiment:
    """The settled experiment, on another cluster if it is given. Raises :class:`UserError` as the command line does."""
    named = [key for key in FILES if key in request.workload]
    if named:
        raise UserError(f"the page does not read files ({', '.join(named)})", "use the command line")
    for technique in techniques_of(Plan.parse(request.plan)):
        if technique.reads():
            raise UserError(f"the page does not read files ({technique.card.name})", "use the command line")
    fields = {k: v for k, v in request.workload.items() if v is not None}
    spec = model_of(request.model)
    if fields.get("kind", "pretrain") in ("pretrain", "finetune"):
        fields.setdefault("seq_len", min(2048, spec.max_positions))
    return experiments.make(spec, on or cluster_of(request.on, request.device), fields, request.plan, where="plan")


def answer(request: PlanRequest) -> dict[str, Any]:
    """Everything that the page shows about a plan."""
    e = experiment_of(request)
    result, chip = predict(e), e.cluster.device.chip
    return {
        "result": json.loads(result.to_json(indent=None)),
        "cluster": {"label": e.cluster.label, "size": e.cluster.size, "memory_bytes": e.cluster.device.memory_bytes,
                    "reserved_bytes": e.cluster.device.reserved_bytes},
        "plan": brief(e.plan),
        "states": states(e),
        "chip": None if chip is None else chip_answer(chip, result, e.cluster.size),
        "tree": tree_document(result),
        "timeline": timeline(predict_trace(e)) if e.is_training else [],
        "command": command(request, e),
        "toml": experiments.to_toml(e),
    }  # fmt: skip


def states(e: Experiment) -> dict[str, dict[str, str]]:
    """By technique: "on", "off", or "refused" with the reason why it cannot be added to the plan."""
    found: dict[str, dict[str, str]] = {}
    for name, cls in registry().items():
        if e.plan.has(name):
            found[name] = {"state": "on", "why": ""}
            continue
        call = Call(name=name, options=dict(cls.card.example))
        try:
            check(normalize(e.model_copy(update={"plan": Plan(calls=(*e.plan.calls, call)), "parallel": {}})))
            found[name] = {"state": "off", "why": ""}
        except UserError as error:
            found[name] = {"state": "refused", "why": f"{error.what}{f': {error.fix}' if error.fix else ''}"}
    return found


def command(request: PlanRequest, e: Experiment) -> str:
    """The `ridgeline predict` command line of a plan, or what to do where no command line can express it."""
    if request.device or PREFIX in request.on or isinstance(request.model, dict):
        return "ridgeline predict plan.toml"
    words = ["ridgeline", "predict", request.model, "--on", request.on, "--task", e.task]
    for name, value in request.workload.items():
        if name != "kind" and value is not None:
            words += [f"--{name.replace('_', '-')}", _number(value) if isinstance(value, float) else str(value)]
    for call in request.plan:
        words += ["--with", call]
    return shlex.join(words)


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def tree_document(result: Result) -> dict[str, Any] | None:
    """The tree of bounds as plain data; None for a result without a time to explain, as of what does not fit."""
    try:
        return _part(tree(result, headline(result)))
    except UserError:
        return None


def _part(t: TimePart) -> dict[str, Any]:
    return {"name": t.name, "seconds": t.seconds, "share": t.share, "bound": t.bound, "note": t.note,
            "children": [_part(c) for c in t.children]}  # fmt: skip


def timeline(events: list[StreamEvent]) -> list[tuple[str, str, str, float, float]]:
    """(stream, phase, name, start, end) of a step's bars: neighbors of one phase and stream are merged, closer ones
    first, until at most :data:`EVENTS` are left."""
    if not events:
        return []
    whole = max(v.start + v.seconds for v in events)
    by_stream: dict[str, list[StreamEvent]] = {}
    for v in sorted(events, key=lambda v: v.start):
        by_stream.setdefault(v.stream, []).append(v)
    gap, bars = 0.0, _bars(by_stream, -1.0)
    while len(bars) > EVENTS:
        gap = 2 * gap or 1e-4 * whole
        bars = _bars(by_stream, gap)
    return bars


def _bars(streams: dict[str, list[StreamEvent]], gap: float) -> list[tuple[str, str, str, float, float]]:
    """Bars in which events of one phase at most ``gap`` seconds apart are one; less than 0: every event is its own."""
    bars: list[tuple[str, str, str, float, float]] = []
    for stream, events in streams.items():
        open_: tuple[str, str, str, float, float] | None = None
        for v in events:
            end = v.start + v.seconds
            if open_ and gap >= 0 and v.phase == open_[1] and v.start - open_[4] <= gap:
                open_ = (stream, v.phase, v.phase, open_[3], max(end, open_[4]))
                continue
            if open_:
                bars.append(open_)
            open_ = (stream, v.phase, v.name, v.start, end)
        if open_:
            bars.append(open_)
    return bars
