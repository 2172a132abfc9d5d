"""Weights stored off the device: the cost of fetching them in a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.graph import Graph, Op
from ridgeline.predict.serving.weight_stream import STREAMS, streamed_seconds
from ridgeline.predict.step.streams import seconds_of, simulate
from ridgeline.spec.device import Cluster


class Transfers(NamedTuple):
    """Seconds of one forward pass, in the steady state of one pass after the other."""

    beside: float
    """In which weights still arrive beside computation: a pass takes at least as long, and ``before``."""
    before: float
    """In which computation waits."""


def weight_transfers(g: Graph, cluster: Cluster) -> Transfers:
    """Transfer times of the weights of ``g`` that are stored off the device.

    For prefetched weights, disk, host link and computation work in parallel, and the slowest is the bottleneck. Waits
    for room in one piece are left out, and where there is no room for two of the largest, nothing overlaps. A CPU
    copies host memory with the cores that compute, so its copies cannot overlap.
    """
    ring = [(o.link_bytes, b.repeat) for b in g.blocks for o in b.gather_forward if o.behind == "weights"]
    enough = min(2 * max(size for size, _ in ring), sum(size * n for size, n in ring)) if ring else 0.0
    overlap = (1 + 1e-9) * g.weight_buffers >= enough
    busy, before = _sums(g, cluster, lambda o: not o.behind or (o.behind == "weights" and not overlap))
    return Transfers(max(0.0, busy - before), before)


def pass_seconds(g: Graph, cluster: Cluster) -> float:
    """Seconds of one forward pass with the torch model, including the transfer of weights."""
    if not any(o.axis == "host" for b in g.blocks for o in b.gather_forward):
        return simulate(g, cluster, []).seconds
    busy, before = _sums(g, cluster, lambda o: not o.behind, copies=False)
    return max(streamed_seconds(g, cluster) + before, busy)


def _sums(g: Graph, cluster: Cluster, waits: Callable[[Op], bool], copies: bool = True) -> tuple[float, float]:
    """(seconds of the busiest stream, seconds in which computation waits: for what ``waits``, and while the cores that
    compute copy host memory; without ``copies`` for those only that no ring takes)."""
    busy, before = dict.fromkeys((*STREAMS.values(), "host_product"), 0.0), 0.0
    for b in g.blocks:
        for op in b.gather_forward:
            if op.axis == "host":
                seconds = b.repeat * seconds_of(op, cluster)
                shared = op.kind == "h2d" and cluster.device.kind == "cpu"
                if waits(op) or (shared and (copies or op.behind != "weights")):
                    before += seconds
                stream = STREAMS.get(op.kind, op.kind)
                if stream in busy and not shared:
                    busy[stream] += seconds
    return max(busy.values()), before
