"""Collective time: latency–bandwidth (alpha–beta) model of ring algorithms over the actual topology.

For n ranks and a full buffer of B bytes (Thakur et al. 2005, doi:10.1177/1094342005051521):
all-reduce moves 2(n-1)/n · B per rank in 2(n-1) steps; all-gather and reduce-scatter move (n-1)/n · B in n-1 steps.
"""

from __future__ import annotations

from ridgeline.graph.graph import Op
from ridgeline.predict.kernel import Timed, find_rate
from ridgeline.spec.device import Cluster

_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_LINK_SHARE = 0.80
"""Share of the link's bandwidth that large ring collectives reach (class default)."""


def collective_time(op: Op, cluster: Cluster) -> Timed:
    """Seconds of one collective among ``op.ranks`` ranks."""
    n = op.ranks
    if n < 2:
        return Timed(0.0, "link", "one rank")
    device = cluster.device
    measured = find_rate(device, op.kind, "", "fp32")
    if measured is not None and measured.byte_rate:
        return Timed(measured.latency + op.link_bytes / measured.byte_rate, "link", measured.source)
    bandwidth, latency = ring_link(cluster, n)
    rounds = _STEPS.get(op.kind, 1)
    moved = rounds * (n - 1) / n * op.link_bytes
    return Timed(rounds * (n - 1) * latency + moved / (bandwidth * _LINK_SHARE), "link", "class default")


def ring_link(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """(bytes/s per rank, seconds per hop) of a ring over ``ranks`` neighbouring devices.

    Across nodes every device drives its own network card, so a node's rings share the sum of its cards.
    """
    device = cluster.device
    if device.link is not None:
        bandwidth, latency = device.link.bandwidth, device.link.latency
    else:
        bandwidth, latency = device.memory_bandwidth / 4, 20e-6  # through host memory: two copies, read and write
    if ranks > cluster.devices_per_node and cluster.nodes > 1:
        if device.network is not None:
            across, hop = device.network.bandwidth * cluster.devices_per_node, device.network.latency
        else:
            across, hop = 12.5e9, 10e-6  # one 100 Gb/s card per node
        return min(bandwidth, across), max(latency, hop)
    return bandwidth, latency
