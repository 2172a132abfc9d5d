"""Weights stored off the device: the cost of fetching them in a forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.graph import Graph
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

    For prefetched weights, disk, host link and computation work in parallel, and the slowest is the bottleneck. A CPU
    copies host memory with the cores that compute, so its copies cannot overlap.
    """
    busy, before = {"disk": 0.0, "h2d": 0.0, "d2h": 0.0, "host_product": 0.0}, 0.0
    for b in g.blocks:
        for op in b.gather_forward:
            if op.axis == "host":
                seconds = b.repeat * seconds_of(op, cluster)
                shared = op.kind == "h2d" and cluster.device.kind == "cpu"
                if shared or not op.behind:
                    before += seconds
                stream = "disk" if op.kind.startswith("disk") else op.kind
                if stream in busy and not shared:
                    busy[stream] += seconds
    return Transfers(max(0.0, max(busy.values()) - before), before)


def pass_seconds(g: Graph, cluster: Cluster) -> float:
    """Seconds of one forward pass with the torch model, including the transfer of weights."""
    found = weight_transfers(g, cluster)
    if not any(found):
        return simulate(g, cluster, []).seconds
    bare = replace(g, blocks=[replace(b, gather_forward=[]) for b in g.blocks])
    return max(simulate(bare, cluster, []).seconds, found.beside) + found.before
