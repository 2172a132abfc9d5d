"""Where the weights of a checkpoint rest under stated limits of memory: on the device, in host memory, or on disk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline import catalog, experiments
from ridgeline.graph import Graph, tokens_graph
from ridgeline.measure.probing.disk import file_rate, folder_rate
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.predict.serving.weight_transfers import weight_transfers
from ridgeline.report.units import metric
from ridgeline.spec.device import Cluster, Host, Link
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import check, registry, techniques_of
from ridgeline.techniques.technique import Technique

_CACHE_SHARE = 0.95
"""Of the device memory that weights and workspace leave: what the cache takes where the device's memory is stated."""
_MORE = (1.25, 1.5, 2.0)
"""Device memory, relative to the limit, of which the prediction is told beside the chosen placement."""

_STEP = 1.02
"""Between device memories that are tried where nothing fits; what is told is more by what rounding takes."""


@dataclass(frozen=True)
class MemoryLimits:
    """What may be used: bytes of the device and of host memory, and a folder on disk. None: what the machine has, and
    no disk."""

    device: int | None = None
    host: int | None = None
    disk: Path | None = None

    @property
    def any(self) -> bool:
        """Whether something was stated."""
        return self != MemoryLimits()


@dataclass(frozen=True)
class Placement:
    """The fastest predicted placement within the limits."""

    experiment: Experiment
    """Settled, with the technique that places the weights in its plan."""
    result: Result
    graph: Graph
    """The forward pass of one token."""
    more: tuple[tuple[float, float], ...]
    """(bytes of device memory, predicted throughput relative to this) for larger devices."""

    @property
    def rows(self) -> list[tuple[str, str, float]]:
        """(what, where it rests, bytes)."""
        g, sizes = self.graph, dict[tuple[str, str], float]()
        for b in g.blocks:
            disk = any(o.kind == "disk_read" for o in b.gather_forward)
            what = "layers" if b.is_layer else "embedding, norm and head"
            for p in b.params:
                for where, share in (("device", p.resident), ("disk" if disk else "host memory", 1 - p.resident)):
                    if share:
                        key = (f"weights of {what}", where)
                        sizes[key] = sizes.get(key, 0.0) + p.stored_bytes * b.repeat * share
        if g.weight_buffers:
            sizes["weights on their way", "device"] = g.weight_buffers
        return [*((what, where, size) for (what, where), size in sizes.items()), ("KV cache", "device", self.cache)]

    @property
    def cache(self) -> int:
        """Bytes of the key/value cache."""
        return int(sum(m.bytes for m in self.result.memory if m.category == "kv_cache"))

    @property
    def rate(self) -> float:
        """Predicted tokens per second."""
        return self.result.metrics["tokens_per_s"].value

    @property
    def sequences(self) -> int:
        """Sequences at a time for which it was chosen."""
        w = self.experiment.workload
        assert isinstance(w, Serve)
        return w.concurrency or 1

    @property
    def bound(self) -> str:
        """What sets the pace of a decode step."""
        found = weight_transfers(self.graph, self.experiment.cluster)
        step = self.result.metrics["tpot_p50_s"].value
        if not any(found):
            return f"computation: tokens come every {step * 1e3:.1f} ms"
        seconds = sum(found)
        what = "the arrival of weights" if seconds > step / 2 else "computation"
        return f"{what}: weights take {seconds * 1e3:.1f} ms a step, tokens come every {step * 1e3:.1f} ms"


def place(
    checkpoint: Path, plan: Sequence[str], limits: MemoryLimits, *, sequences: int = 64, prompt_len: int = 256,
    output_len: int = 128, **workload: object,
) -> Placement:  # fmt: skip
    """The placement for a checkpoint on this machine, judged by ``sequences`` at a time of these lengths.

    All weights on the device are tried, and each technique that decides where weights rest with its choices; where the
    plan has one of these, only that. Raises :class:`UserError` where nothing fits, with what is missing.
    """
    if limits.disk is not None and not limits.disk.is_dir():
        raise UserError(
            f"there is no folder {limits.disk}, in which layers may rest", "create it, or give another --disk"
        )
    cluster = _limited(catalog.cluster("local"), checkpoint, limits)
    model = catalog.model(str(checkpoint))
    longest = min(int(workload.get("max_model_len") or model.max_positions), model.max_positions)  # type: ignore[call-overload]
    output = min(output_len, longest // 2)
    if limits.device is not None and workload.get("kv_cache_bytes") is None:
        workload["kv_cache_share"] = _CACHE_SHARE
    w = {"kind": "serve", "concurrency": sequences, "requests": 2 * sequences, "output_len": output,
         "prompt_len": max(1, min(prompt_len, longest - output)), **workload}  # fmt: skip

    def make(on: Cluster, *more: str) -> Experiment:
        return experiments.make(str(checkpoint), on, dict(w), [*plan, *more])

    def best(on: Cluster) -> tuple[Experiment, Result] | None:
        whole = make(on)
        asked = any("resting_weights" in t.card.owns for t in techniques_of(whole.plan))
        made = [whole, *(make(on, call) for call in ([] if asked else _choices(whole, limits.disk)))]
        found = [(e, _predicted(e)) for e in made]
        fitting = [(e, r) for e, r in found if r is not None]
        return max(fitting, key=lambda pair: pair[1].metrics["tokens_per_s"].value, default=None)

    chosen = best(cluster)
    if chosen is None:
        sizes, most = [cluster.device.memory_bytes], catalog.cluster("local").device.memory_bytes
        while sizes[-1] * _STEP < most:
            sizes.append(sizes[-1] * _STEP)
        first = bisect_left(sizes, True, key=lambda size: best(_with_memory(cluster, size)) is not None)
        raise UserError(*_missing(checkpoint, cluster, limits, 1.01 * sizes[first] if first < len(sizes) else None))
    e, result = chosen
    rate = result.metrics["tokens_per_s"].value
    device = cluster.device
    larger = []
    for times in _MORE if limits.device is not None else ():
        other = best(_with_memory(cluster, device.memory_bytes * times))
        if other is not None:
            larger.append((device.memory_bytes * times, other[1].metrics["tokens_per_s"].value / rate))
    g = rewritten(tokens_graph(e.model, 1, 1, 1, e.dtype), e, check(e))
    return Placement(e, result, g, tuple(larger))


def _predicted(e: Experiment) -> Result | None:
    """The prediction, where the experiment fits."""
    try:
        result = predict(e)
    except UserError:  # a pool without room
        return None
    return result if result.status == "ok" else None


def _choices(e: Experiment, disk: Path | None) -> list[str]:
    """The settings worth trying of the techniques that decide where weights rest."""
    found: list[str] = []
    for cls in registry().values():
        if "resting_weights" in cls.card.owns and cls.card.runs and e.task in cls.card.tasks:
            for t in cls.choices(e):
                options = t.model_dump(mode="json", exclude_defaults=True)
                if _on_disk(t, e):
                    if disk is None:
                        continue
                    options["path"] = str(disk)
                found.append(str(Call(name=t.card.name, options=options)))
    return found


def _on_disk(t: Technique, e: Experiment) -> bool:
    g = t.rewrite(tokens_graph(e.model, 1, 1, 1, e.dtype), e)
    return any(o.kind == "disk_read" for b in g.blocks for o in b.gather_forward)


def _limited(cluster: Cluster, checkpoint: Path, limits: MemoryLimits) -> Cluster:
    """This machine with no more than the limits, and with the disk as it is measured."""
    device = cluster.device
    changes: dict[str, object] = {}
    if limits.device is not None:
        changes["memory_bytes"] = min(float(limits.device), device.memory_bytes)
    if limits.host is not None:
        changes["host"] = Host(name="this machine", cores=max(1, device.sm_count), memory_bytes=limits.host,
                               memory_bandwidth=device.memory_bandwidth)  # fmt: skip
    if limits.disk is not None:
        changes["disk"] = _slower(checkpoint, limits.disk)
    return cluster.model_copy(update={"device": device.model_copy(update=changes)})


def _with_memory(cluster: Cluster, size: float) -> Cluster:
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_bytes": size})})


def _slower(checkpoint: Path, folder: Path) -> Link:
    """The disk of the checkpoint's files or that of ``folder``, whichever is read more slowly."""
    links = [folder_rate(folder, str(folder))]
    files = sorted(checkpoint.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    if files:
        links.append(file_rate(files[-1], str(checkpoint)))
    return min(links, key=lambda link: link.bandwidth)


def _missing(checkpoint: Path, cluster: Cluster, limits: MemoryLimits, enough: float | None) -> tuple[str, str]:
    """What to say where nothing fits, and what would: with ``enough`` bytes of device memory something does."""
    device = metric(cluster.device.memory_bytes, "bytes")
    host = "" if limits.host is None else f" and {metric(limits.host, 'bytes')} of host memory"
    memory = "more memory" if enough is None else f"{metric(enough, 'bytes')} of device memory"
    more = "" if limits.disk is not None else ", or --disk PATH for weights on disk"
    smaller = "a smaller --max-model-len, --max-num-seqs or --max-num-batched-tokens"
    return (f"{checkpoint} does not fit into {device} of device memory{host}, wherever its layers rest",
            f"give {memory}{more}, or {smaller}")  # fmt: skip
