"""Weights stored off the device: the cost of fetching them in a forward pass."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.graph import Graph
from ridgeline.predict.serving.weight_stream import STREAMS, streamed_seconds, waits
from ridgeline.predict.step.block_times import seconds_of
from ridgeline.predict.step.streams import simulate
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
    alone = (1 + 1e-9) * g.weight_buffers < enough
    before = sum(b.repeat * seconds_of(o, cluster) for b in g.blocks for o in b.gather_forward
                 if o.axis == "host" and (waits(o, cluster) or (alone and o.behind == "weights")))  # fmt: skip
    return Transfers(max(0.0, _busiest(g, cluster) - before), before)


def pass_seconds(g: Graph, cluster: Cluster) -> float:
    """Seconds of one forward pass with the torch model, including the transfer of weights."""
    if not any(o.axis == "host" for b in g.blocks for o in b.gather_forward):
        return simulate(g, cluster, []).seconds
    return max(streamed_seconds(g, cluster), _busiest(g, cluster))


def _busiest(g: Graph, cluster: Cluster) -> float:
    """Seconds of the busiest of disk, link and host, of what they do themselves."""
    busy = dict.fromkeys((*STREAMS.values(), "host_product"), 0.0)
    for b in g.blocks:
        for op in b.gather_forward:
            stream = STREAMS.get(op.kind, op.kind)
            if stream in busy and not (op.kind == "h2d" and cluster.device.kind == "cpu"):
                busy[stream] += b.repeat * seconds_of(op, cluster)
    return max(busy.values())
