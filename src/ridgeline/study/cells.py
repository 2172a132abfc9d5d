"""From a point on the axes to an experiment."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.study import Axis
from ridgeline.study.file import OWN, StudyFile, TableFile
from ridgeline.techniques.registry import registry

RANK = 16
"""Largest rank of adapters on a small model."""
HERE = "this machine"
"""The platform of a study at a scale."""
LARGEST = 4096
"""Largest number of sequences per device that is tried for the largest batch."""


@dataclass(frozen=True)
class StudyScale:
    """What a study is shrunk to for a small machine: every model is one small model, lengths and loads are short."""

    model: str
    devices: int
    seq_len: int = 128
    largest_batch: int = 8
    requests: int = 32

    def plan(self, calls: list[str]) -> list[str]:
        """The plan with degrees of parallelism that the small machine has (without those that come to 1), and ranks of
        adapters for a small model."""
        most = {"degree": self.devices, "rank": RANK}
        found = [re.sub(r"\b(degree|rank)=(\d+)", lambda m: f"{m[1]}={min(int(m[2]), most[m[1]])}", c) for c in calls]
        return [c for c in found if not re.search(r"\bdegree=1\b", c)]

    def workload(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The workload at this scale."""
        out = dict(fields)
        if out["kind"] in ("pretrain", "finetune"):
            return {**out, "seq_len": min(out.get("seq_len", self.seq_len), self.seq_len), "steps": 6}
        for name, most in (("prompt_len", self.seq_len), ("output_len", self.seq_len // 4)):
            out[name] = min(out.get(name, most), most)
        for name in ("requests", "concurrency"):
            if name in out:
                out[name] = min(out[name], self.requests)
        out.pop("engine", None)
        return out

    def study(self, study: StudyFile) -> StudyFile:
        """The study at this scale: one model on one machine, and each different point of an axis once. Tables of
        single operators are left out (`ridgeline probe --sweep` measures them)."""
        tables = [
            t.model_copy(update={"axes": {name: list(dict.fromkeys(self.place({name: v})[name] for v in values
                                                                   if name != "devices" or int(v) <= self.devices))
                                          for name, values in t.axes.items()}})
            for t in study.tables if t.operator is None
        ]  # fmt: skip
        platforms = {**study.platforms, HERE: f"{self.devices}xlocal"}
        return study.model_copy(update={"tables": tables, "platforms": platforms})

    def place(self, axes: dict[str, Axis]) -> dict[str, Axis]:
        """A point on the axes of the whole study, at this scale."""
        whole = {"model": self.model, "platform": HERE, "engine": "ridgeline"}
        lengths = {"prompt_len", "output_len", "seq_len", "requests", "concurrency"} & axes.keys()
        shrunk = self.workload({"kind": "pretrain" if "seq_len" in axes else "serve", **{k: axes[k] for k in lengths}})
        each = {"each": min(int(axes["each"]), self.largest_batch)} if axes.get("each", "max") != "max" else {}
        return {**axes, **{k: v for k, v in whole.items() if k in axes}, **{k: shrunk[k] for k in lengths}, **each}


def experiment_of(
    study: StudyFile, table: TableFile, place: dict[str, Axis], scale: StudyScale | None = None
) -> Experiment:
    """The settled experiment of a cell. Raises :class:`UserError` for one that is refused."""
    if "system" in place:
        return _system(str(place["system"]))
    work = {"kind": "pretrain", **table.workload, **{k: v for k, v in place.items() if k not in OWN}}
    model = str(place.get("model", table.workload.get("model", "llama2-7b")))
    work.pop("model", None)
    platform = str(place.get("platform", "local"))
    cluster = catalog.cluster(study.platforms.get(platform, platform))
    if "devices" in place:
        cluster = _devices(cluster, int(place["devices"]))
    if scale is not None:
        if work["kind"] == "generate":
            scale = replace(scale, devices=1)  # a generation runs in one process here
        model, work = scale.model, scale.workload(work)
        cluster = catalog.cluster(f"{min(cluster.size, scale.devices)}xlocal")
    plan = [*(study.base if table.base is None else table.base), *study.plan(str(place.get("plan", "")))]
    plan = [call for call in plan if call]
    plan = plan if scale is None else scale.plan(plan)
    each = place.get("each")
    if each == "max":
        return largest(model, cluster, work, plan, scale.largest_batch if scale else LARGEST)
    if each is not None:
        each = int(each) if scale is None else min(int(each), scale.largest_batch)
        work["batch_size"] = each * (cluster.size if work["kind"] in ("pretrain", "finetune") else 1)
    return experiments.make(model, cluster, work, _with_examples(plan))


def _with_examples(plan: list[str]) -> list[str]:
    """Techniques that need options, with their example options."""
    known = registry()

    def call(text: str) -> str:
        options = known[text].card.example if text in known else {}
        return f"{text}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else text

    return list(dict.fromkeys(call(text) for text in plan))


def _system(name: str) -> Experiment:
    r = catalog.system(name).reported
    return experiments.make(r.model, r.on, {**r.workload}, [name])


def _devices(cluster: Cluster, count: int) -> Cluster:
    if count <= cluster.devices_per_node:
        return cluster.model_copy(update={"devices_per_node": count, "nodes": 1})
    each = cluster.devices_per_node
    if count % each:
        raise Incompatible(f"{count} devices are no whole number of nodes of {each}", "choose a multiple")
    return cluster.model_copy(update={"nodes": count // each})


def largest(model: str, cluster: Cluster, work: dict[str, Any], plan: list[str], most: int) -> Experiment:
    """The experiment with the most sequences per device that fit, a power of two and then halves between; with one per
    device where not even that fits."""

    def at(each: int) -> Experiment:
        ranks = cluster.size if work["kind"] in ("pretrain", "finetune") else 1
        return experiments.make(model, cluster, {**work, "batch_size": each * ranks}, _with_examples(plan))

    best, low, high = at(1), 0, 1
    while high <= most and predict(e := at(high)).status == "ok":
        best, low, high = e, high, 2 * high
    for _ in range(3):  # to an eighth of the way to the next power of two
        middle = (low + high) // 2
        if middle in (low, high) or high > most:
            break
        if predict(e := at(middle)).status == "ok":
            best, low = e, middle
        else:
            high = middle
    return best


def command(e: Experiment) -> str:
    """The command line that predicts a cell."""
    words = ["ridgeline", "predict", e.model.name, "--on", e.cluster.label, "--task", e.task]
    shown = ("seq_len", "batch_size", "prompt_len", "output_len", "rate", "concurrency", "requests", "engine")
    for name, value in e.workload.model_dump(exclude_none=True, exclude_defaults=True).items():
        if name in shown:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for call in e.plan.strings():
        words += ["--with", call]
    return shlex.join(words)
