"""Work outside the device: copies over the host link, the CPU's optimizer step, disk I/O."""

from __future__ import annotations

import math

from ridgeline.graph.graph import Op
from ridgeline.predict.operators.kernel import Timed
from ridgeline.spec.device import Cluster, Host

COPIES = {"d2h": "out", "h2d": "in", "disk_read": "in", "disk_write": "out", "host_update": "host",
          "host_read": "host", "host_product": "host"}  # fmt: skip
"""Kinds of host operators, and the stream each runs on."""
_LINK_SHARE = 0.80
"""Fraction of the host link's bandwidth that pinned copies reach."""
_HOST_BANDWIDTH = 256e9
"""Bytes/s of an ordinary server's memory: a DGX-2's, of two Xeon Platinum 8168 with six channels of DDR4-2666 each."""
_UPDATE_SHARE = 0.5
"""Fraction of it reached by a vectorized AdamW: 28 bytes per parameter in 0.22 s per 10⁹ parameters (arXiv:2101.06840,
table 4)."""
_CORE_BANDWIDTH = 5e9
"""Bytes/s of it that one core updates at most (assumption)."""
_CORE_ATTENTION = 0.77e9
"""Bytes/s of a 16-bit cache that one core attends to: FlexGen's cost model (arXiv:2303.06865) has 12.3 GFLOP/s, which
is as many bytes/s, on a server of 16 cores."""
_GATHER_SHARE = 0.5
"""Fraction of the host's memory bandwidth at which it multiplies by rows gathered from a matrix (measured on two cores:
0.39 of a whole product's where each row is a sum, 0.65 where it is weighted and summed)."""
_HOST_CORES = 48
"""Cores of an ordinary server: a DGX-2's."""
_UPLINKS = 4
"""Number of devices per node whose host links reach full rate simultaneously, where that is not known; more share them
(PCIe switches, host memory)."""
_DISKS, _DISK_BANDWIDTH = 2, 3e9
"""Drives of a node of which nothing is known, and bytes/s of one: assumption."""
_ORDINARY = Host(name="an ordinary server", memory_bytes=math.inf)
"""One of which nothing is known."""


def faster_paths(host: Host | None, factor: float) -> Host:
    """The server with ``factor`` times the bandwidth of PCIe lanes and drives; what is not known is an ordinary
    one's."""
    known = host or _ORDINARY
    lanes = known.pcie_lanes and known.pcie_lanes * factor
    disk = (known.disk_bandwidth or _DISK_BANDWIDTH) * factor
    return known.model_copy(update={"pcie_lanes": lanes, "disk_bandwidth": disk})


def faster_host(host: Host | None, factor: float) -> Host:
    """The server with ``factor`` times the cores and the memory bandwidth; what is not known is an ordinary one's."""
    known = host or _ORDINARY
    return known.model_copy(update={"memory_bandwidth": (known.memory_bandwidth or _HOST_BANDWIDTH) * factor,
                                    "cores": (known.cores or _HOST_CORES) * factor})  # fmt: skip


def host_time(op: Op, cluster: Cluster) -> Timed:
    """Seconds of a copy or of the CPU's update for one rank, while the node's other ranks do the same."""
    ranks = cluster.devices_per_node
    host = cluster.device.host or _ORDINARY
    bandwidth, cores = host.memory_bandwidth or _HOST_BANDWIDTH, host.cores or _HOST_CORES
    if op.kind == "host_update":
        rate = min(_UPDATE_SHARE * bandwidth, cores * _CORE_BANDWIDTH)
        return Timed(op.bytes * ranks / rate, "memory", "class default")
    if op.kind == "host_product":
        rate = _GATHER_SHARE * bandwidth
        return Timed(op.bytes * ranks / rate, "memory", "class default")
    if op.kind == "host_read":
        rate = min(bandwidth, cores * _CORE_ATTENTION)
        return Timed(op.bytes * ranks / rate, "memory", "class default")
    if op.kind in ("disk_read", "disk_write"):
        disk = cluster.device.disk
        if disk is not None:
            return Timed(
                op.requests * disk.latency + op.link_bytes / disk.bandwidth, "link", disk.source or "datasheet"
            )
        rate = (host.disks or _DISKS) * (host.disk_bandwidth or _DISK_BANDWIDTH)
        return Timed(op.link_bytes * ranks / rate, "link", "class default")
    link = cluster.device.host_link
    if link is None:  # a CPU's memory is the host's
        return Timed(2 * op.link_bytes / cluster.device.memory_bandwidth, "memory", "class default")
    shared = max(1.0, ranks / (host.uplinks or _UPLINKS))
    if host.pcie_bandwidth:
        shared = max(shared, ranks * link.bandwidth / host.pcie_bandwidth)
    seconds = op.requests * link.latency + op.link_bytes * shared / (link.bandwidth * _LINK_SHARE)
    return Timed(seconds, "link", "class default")
