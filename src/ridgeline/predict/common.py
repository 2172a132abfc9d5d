"""Shared code of all predictions: the rewritten graph, the rank's view of the cluster, and the assembly of a Result."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from ridgeline.graph import Graph
from ridgeline.predict.machine import machine
from ridgeline.predict.step.peak_memory import Peak
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment, id_of
from ridgeline.spec.result import Memory, Metric, Result
from ridgeline.techniques.technique import Technique

GIB = 2**30


def rewritten(g: Graph, e: Experiment, techniques: list[Technique]) -> Graph:
    """The graph after every technique's pass, in canonical order."""
    for t in techniques:
        g = t.rewrite(g, e)
    return g.close()


def beyond_host(g: Graph, cluster: Cluster) -> str:
    """Why the offloaded tensors of one node's ranks do not fit in its host's memory; empty if they fit."""
    for part in cluster.parts or (cluster,):
        host, need = part.device.host, g.host_bytes * part.devices_per_node
        if host is not None and need > host.memory_bytes:
            return (f"needs {need / GIB:.1f} GiB of host memory per node, which has {host.memory_bytes / GIB:.1f} GiB"
                    f" ({host.name})")  # fmt: skip
    return ""


def unknown_host(host_bytes: float, cluster: Cluster) -> list[str]:
    """What ``host_bytes`` of a rank need of host memory, for each device of ``cluster`` whose server is not stated."""
    return [
        f"host memory is not known for {part.device.name}: {host_bytes * part.devices_per_node / GIB:.1f} GiB per node"
        " are needed"
        for part in cluster.parts or (cluster,)
        if host_bytes and part.device.kind == "gpu" and part.device.host is None
    ]


_RECENT = 16
_ranks_view: list[tuple[Cluster, Cluster]] = []


def rank_cluster(e: Experiment) -> Cluster:
    """The cluster as one rank sees it: a CPU's ranks share its cores and memory. The same object for the same cluster,
    as operators remember their time on it."""
    for whole, view in _ranks_view:
        if whole is e.cluster:
            return view
    shared = e.cluster.device.shared_by(e.cluster.devices_per_node)
    _ranks_view.insert(0, (e.cluster, e.cluster.model_copy(update={"device": shared})))
    del _ranks_view[_RECENT:]
    return _ranks_view[0][1]


def assemble(e: Experiment, metrics: dict[str, Metric], peak: Peak, cluster: Cluster) -> Result:
    """Assemble a Result from metrics and the peak on a rank of ``cluster``: adds memory, whether it fits, cost and
    energy."""
    categories = dict(peak.categories)
    if cluster.device.reserved_bytes:
        categories["framework"] = cluster.device.reserved_bytes
    total = sum(categories.values())
    largest = max(categories, key=lambda k: categories[k])
    metrics["peak_bytes"] = metric(total, "bytes", "lower", "graph")
    device = cluster.device
    fits = total <= device.memory_bytes
    verdict = (
        f"needs {total / GIB:.1f} GiB per rank of {device.memory_bytes / GIB:.1f} GiB on {device.name};"
        f" largest category: {largest}, {categories[largest] / GIB:.1f} GiB; peak at {peak.instant}"
    )
    if "tokens_per_s" in metrics:
        for name, value in cost_of(e.cluster, metrics["tokens_per_s"].value).items():
            metrics[name] = metric(value, *COSTS[name])
    canonical = e.canonical()
    return Result(
        source="predicted",
        experiment_id=id_of(canonical),
        name=e.name,
        experiment=canonical,
        status="ok" if fits else "infeasible",
        reason="" if fits else verdict,
        environment={
            "device": e.cluster.label,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "rates": source_of(cluster),
        },
        metrics=metrics,
        memory=[Memory(category=k, bytes=v) for k, v in sorted(categories.items(), key=lambda kv: -kv[1])],
        notes=[verdict] if fits else [],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


COSTS: dict[str, tuple[str, Literal["lower"], str]] = {
    "dollars_per_million_tokens": ("$", "lower", "catalog price"),
    "joules_per_token": ("J", "lower", "TDP, an upper bound"),
}
"""Unit, direction and source of what a token costs."""


def cost_of(cluster: Cluster, rate: float) -> dict[str, float]:
    """Dollars per million tokens and joules per token of a cluster at ``rate`` tokens/s, where known."""
    out = {}
    parts = cluster.parts or (cluster,)
    if all(part.device.price_per_hour for part in parts):
        dollars = sum(part.device.price_per_hour * part.size for part in parts)
        out["dollars_per_million_tokens"] = dollars / 3600 / rate * 1e6
    if all(part.device.watts for part in parts):
        out["joules_per_token"] = sum(part.device.watts * part.size for part in parts) / rate
    return out


def metric(value: float, unit: str, better: Literal["lower", "higher", ""], source: str) -> Metric:
    """One metric without a confidence interval."""
    return Metric(value=value, unit=unit, better=better, source=source)


def trained(g: Graph) -> float:
    """Number of trained elements on one rank."""
    return sum(p.numel * n for p, n in g.params if p.trainable)


def source_of(cluster: Cluster) -> str:
    """Source of this cluster's rates."""
    return "measured profile" if cluster.device.rates else machine(cluster.device).source


def peak_note(peak: float, dtype: str) -> str:
    """The formula of MFU and HFU in words."""
    return f"matrix-multiply FLOPs over the dense {dtype} peak of {peak / 1e12:.3g} TFLOP/s"
