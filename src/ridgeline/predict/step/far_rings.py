"""Rings over many nodes: what the hops inside each of them add to a collective.

NCCL gathers and scatters in rings alone, which visit every rank: n - 1 hops one after the other, whatever their size. A
collective's own time (``predict/operators/collective_time.py``) holds the hops of one node and those between nodes.
"""

from __future__ import annotations

from ridgeline.graph.graph import Op
from ridgeline.predict.machine import machine
from ridgeline.spec.device import Cluster

_RINGS = ("all_gather", "reduce_scatter")


def other_hops(op: Op, cluster: Cluster) -> float:
    """Seconds that a gather or a scatter among ``op.ranks`` ranks takes for its hops inside all nodes but one."""
    if op.kind not in _RINGS or cluster.nodes < 2:
        return 0.0
    local = min(op.ranks, max(1, cluster.devices_per_node // op.stride))
    hops = op.ranks - local - (-(-op.ranks // local) - 1)
    if local < 2 or hops <= 0:
        return 0.0
    m = machine(cluster.device)
    c = m.efficiency.collective
    return m.slow * min(hops * c.simple_hop, hops * c.ll_hop + op.link_bytes / c.ll_bandwidth)
