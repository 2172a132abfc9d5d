"""Collective time: latency and bandwidth of rings, trees and in-network reduction over the actual topology.

A ring of n ranks sends (n-1)/n of a full buffer of B bytes per rank in n-1 hops, an all-reduce twice that (Thakur et
al. 2005, doi:10.1177/1094342005051521). Each hop uses the fastest of NCCL's three protocols: LL and LL128 trade
bandwidth for latency by sending flags along with the data (Hu et al. 2025, arXiv:2507.04786). Across nodes, each rank
of a node sends over its own network card in parallel (rails).

Over PCIe, devices with peer-to-peer access share host bridges and sockets (``Link.spans``); those without it send every
byte through host memory.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from ridgeline.graph.graph import Op
from ridgeline.predict.machine import Machine, machine
from ridgeline.predict.operators.kernel import Timed, find_rate
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.efficiency import CollectiveConstants

_USUAL_LINK_LATENCY = 2e-6
"""Latency of the links that the constants were fitted on: only the excess over it is added per hop."""
_NVLINK = 100e9
"""Bandwidth from which a link is assumed to be NVLink, where the 128 bytes after a flag arrive atomically (LL128)."""
_SWITCHED = 200e9
"""Bandwidth from which a link is assumed to be a switch's, which may support in-network reduction."""
_FEWEST_IN_NETWORK = 4
_HOST_SHARE = 0.55
"""Bandwidth through host memory relative to that of direct access, where the memory is fast enough. An assumption
between servers of 2019, which slow down where cards send and receive at once (10 GB/s each way between two cards of an
EPYC 7302, github.com/NVIDIA/nccl-tests/issues/74; sums at 3.9 GB/s where broadcasts reach 10, nccl/issues/384), and
those of 2023 (four RTX 5090 at 35 of 63 GB/s; eight at 28, about what their host's memory allows: nccl/issues/1639)."""
_HOST_HOP = 1.5e-6
"""Additional seconds of a hop through host memory, compared with one between devices."""


class Path(NamedTuple):
    """The links that a collective's ring or tree uses."""

    local: int
    """Number of ranks of the group inside one node."""
    nodes: int
    inside: float
    """Bytes/s per rank of a large ring inside a node."""
    outside: float
    """Bytes/s of all the group's network cards in one node; infinite inside one node."""
    hop: float
    """Seconds per hop in addition to an ordinary link's, inside a node."""
    across: float
    """Seconds per hop between nodes; 0 inside one."""
    ll128: bool
    """Whether the protocol of that name is available."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s per rank of the slowest part of a ring."""
        return min(self.inside, self.outside) if self.local > 1 else self.outside


def collective_time(op: Op, cluster: Cluster) -> Timed:
    """Seconds of one collective among ``op.ranks`` ranks with a distance of ``op.stride``."""
    n = op.ranks
    if n < 2:
        return Timed(0.0, "link", "one rank", 0.0)
    if op.wan is not None:
        return Timed(_wide_area(op, *op.wan), "link", "the plan's network", 0.1)
    device = cluster.device
    kind = "all_gather" if op.kind == "ring" else op.kind  # a pass around a ring is one, hop by hop
    measured = find_rate(device, kind, "", "fp32")
    if measured is not None and measured.byte_rate:
        return Timed(measured.latency + op.link_bytes / measured.byte_rate, "link", measured.source, 0.05)
    m = machine(device)
    spaced = cluster.nodes, cluster.devices_per_node, n, op.stride
    return Timed(_modeled(m, kind, op.link_bytes, op.dtype, spaced, op.rails), "link", m.source, m.spread("collective"))


@lru_cache(maxsize=65536)
def _modeled(m: Machine, kind: str, size: float, dtype: str, spaced: tuple[int, int, int, int], rails: int) -> float:
    """Seconds of the many collectives of a step that are alike; ``spaced``: the arguments of :func:`path`."""
    c = m.efficiency.collective
    route = path(c, m.device, *spaced)
    if rails and route.nodes > 1:
        route = route._replace(outside=route.outside * min(1.0, rails / route.local))
    return algorithm_time(m, c, kind, spaced[2], size, route, dtype)


def _wide_area(op: Op, rtt: float, rate: float) -> float:
    """Seconds over a network of ``rate`` bytes/s at each end; a question and its answer, or a ring of n ranks."""
    if op.kind == "all_reduce":
        return 2 * (op.ranks - 1) * (rtt / 2 + op.link_bytes / op.ranks / rate)
    return (rtt if op.kind == "ask" else rtt / 2) + op.link_bytes / rate


def path(c: CollectiveConstants, device: Device, nodes: int, per_node: int, ranks: int, stride: int = 1) -> Path:
    """The route of a group of ``ranks`` devices spaced ``stride`` apart, in a cluster of ``nodes``."""
    local = min(ranks, max(1, per_node // stride)) if nodes > 1 else ranks
    nodes = ceil(ranks / local)
    inside, latency = _inside(device, min(per_node, local * stride))
    inside *= c.bandwidth_share
    hop = max(0.0, latency - _USUAL_LINK_LATENCY)
    link = device.link
    ll128 = link is not None and link.p2p and link.bandwidth >= _NVLINK
    if nodes == 1:
        return Path(local, 1, inside, math.inf, hop, 0.0, ll128)
    network = device.network
    each, far = (network.bandwidth, network.latency) if network else (12.5e9 / per_node, 10e-6)
    return Path(local, nodes, inside, each * local * c.network_share, hop, far + c.network_hop, ll128)


def _inside(device: Device, span: int) -> tuple[float, float]:
    """Bandwidth per device and latency among ``span`` neighbors of a node."""
    link = device.link
    if link is None:
        return device.memory_bandwidth / 4, 20e-6  # through host memory: two copies, read and write
    if not link.p2p:
        rate = _HOST_SHARE * link.bandwidth
        host = device.host
        if host and host.memory_bandwidth:  # every byte is written to its memory and read from it
            rate = min(rate, host.memory_bandwidth / (2 * span))
        if host and host.pcie_bandwidth:
            rate = min(rate, host.pcie_bandwidth / span)
        return rate, link.latency + _HOST_HOP
    return link.across(span), link.latency


def algorithm_time(
    m: Machine, c: CollectiveConstants, kind: str, n: int, size: float, p: Path, dtype: str = "bf16"
) -> float:
    """Seconds of one collective of ``size`` bytes (the full buffer on one rank) by the best algorithm and protocol."""
    slow = m.slow
    start = slow * c.latency
    if kind == "alltoall":
        return start + _alltoall(m, c, n, size, p)
    if kind == "p2p":
        return start + _best_protocol(c, slow, 1, size, p, p.across)
    rounds = 2 if kind == "all_reduce" else 1
    moved = size if kind in ("broadcast", "reduce") else (rounds * (n - 1) + c.local) / n * size
    # NCCL runs all but all-reduces only in rings, which pass every rank of every node; those cross nodes in trees.
    hops = n - p.nodes if kind != "all_reduce" else rounds * (p.local - 1 if p.nodes > 1 else n - 1)
    best = _best_protocol(c, slow, hops, moved, p, rounds * (p.nodes - 1) * p.across)
    if kind != "all_reduce":
        return start + best
    levels = rounds * log2(max(2, p.local)) if p.local > 1 else 0.0
    # Inside a node NCCL's tree is a chain, which crosses every link.
    fixed = levels * slow * c.tree_hop + rounds * ((p.local - 1) * p.hop + log2(p.nodes) * p.across)
    # Up and down a tree each node sends and receives the buffer only once, less its own part.
    whole = rounds * max(size / p.inside if p.local > 1 else 0.0, (p.nodes - 1) / p.nodes * size / p.outside)
    best = min(
        best,
        fixed + max(2.0 * whole, rounds * size * slow / c.ll_bandwidth),
        fixed + slow * c.simple_latency + whole,
    )
    if p.ll128:
        best = min(best, fixed + slow * c.ll128_latency + whole / c.ll128_share)
    if _reduces_in_network(m, c, kind, p, dtype):
        wire = m.device.link.bandwidth * c.nvls_share if m.device.link else 0.0
        sent = max((p.local + 1) / p.local * size / wire, rounds * (p.nodes - 1) / p.nodes * size / p.outside)
        best = min(best, slow * c.nvls_latency + rounds * log2(p.nodes) * p.across + sent)
    return start + best


def _best_protocol(c: CollectiveConstants, slow: float, hops: int, moved: float, p: Path, across: float) -> float:
    plain = moved / p.bandwidth
    best = min(
        slow * hops * c.ll_hop + max(2.0 * plain, moved * slow / c.ll_bandwidth),
        slow * (c.simple_latency + hops * c.simple_hop) + plain,
    )
    if p.ll128:
        best = min(best, slow * (c.ll128_latency + hops * c.ll128_hop) + plain / c.ll128_share)
    return hops * p.hop + across + best


def _alltoall(m: Machine, c: CollectiveConstants, n: int, size: float, p: Path) -> float:
    """Every rank sends to all others at once: traffic inside the node and out of it is transferred in parallel."""
    kept = (p.local - 1 + c.local) / n * size
    seconds = kept / p.inside
    if p.nodes > 1:
        leaving = (n - p.local) / n * size
        seconds = max(seconds, leaving / (p.outside / p.local))
    ramp = c.alltoall_ramp * kept / (kept + c.alltoall_half)
    return m.slow * (c.alltoall_latency + ramp) + (n - 1) * p.hop + p.across + seconds


def _reduces_in_network(m: Machine, c: CollectiveConstants, kind: str, p: Path, dtype: str) -> bool:
    link = m.device.link
    return bool(
        c.nvls_share and kind == "all_reduce" and p.local >= _FEWEST_IN_NETWORK
        and dtype not in ("int8", "fp8", "bool") and link and link.bandwidth >= _SWITCHED
    )  # fmt: skip
