"""Measured collectives: ``device,op,dtype,ranks,bytes,link,seconds``; bytes are nccl-tests' total buffer."""

from __future__ import annotations

import re

from ridgeline.graph.graph import Op
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.spec.device import Cluster, Device, Link
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import BadCell, CsvRow
from ridgeline.validate.dtypes import dtype_of
from ridgeline.validate.nouns import device_of

NAME = "collectives"
REQUIRED = ("device", "op", "ranks", "bytes", "seconds")

_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "alltoall",
    "all2all": "alltoall", "a2a": "alltoall", "broadcast": "broadcast", "bcast": "broadcast", "p2p": "p2p",
    "sendrecv": "p2p",
}  # fmt: skip
"""By the letters and digits of the name: libraries use different separators."""
_ACROSS = ("inter", "ib", "infiniband", "roce", "eth", "network", "efa")
"""Prefixes of the names of links between nodes."""
_PCIE = 0.8
"""Rate of traffic between peers over PCIe, relative to a card's own link to the host (assumption)."""
_NOT_DIRECT = r"\b(no|not|non|without)\b.*(p2p|peer)|(p2p|peer).*(off|none|disable|=0)|host mem|shm|shared mem"
"""Words for transfers between cards through host memory."""
_NETWORK_LATENCY = 5e-6
_NODE = 8
"""Devices of a node, where the row says that the group spans nodes and not how many there are."""


def op_of(row: CsvRow) -> Op:
    """The collective of one row."""
    name = re.sub(r"[^a-z0-9]", "", row.text("op").lower())
    if name not in _NAMES:
        raise BadCell(f"column 'op': {row.text('op')!r} is none of {', '.join(sorted(set(_NAMES.values())))}")
    size = row.number("bytes", above=0)
    return Op(
        _NAMES[name], "communication", _NAMES[name], dtype=dtype_of(row, "dtype", "bf16"), link_bytes=size,
        ranks=row.count("ranks", least=2), axis="tp",
    )  # fmt: skip


def cluster_of(row: CsvRow) -> Cluster:
    """One node of as many devices as ranks, or nodes of eight when the row's link is between nodes."""
    device, ranks, wire = device_of(row), row.count("ranks", least=2), row.text("link", "intra-node").lower()
    if wire.startswith(_ACROSS):
        local = row.count("devices_per_node", _NODE if ranks > _NODE else 1)
        return Cluster(device=_over_cards(device, wire, local), devices_per_node=local, nodes=-(-ranks // local))
    return Cluster(device=_over_pcie(device, wire) if "pci" in wire else device, devices_per_node=ranks)


def _over_cards(device: Device, wire: str, local: int) -> Device:
    """``device`` with its share of the node's network cards, where the row says how many: ``8x200Gb/s``."""
    cards = re.search(r"(\d+) ?x ?(\d+) ?gb", wire)
    if cards is None:
        return device
    each = int(cards[1]) * int(cards[2]) * 1e9 / 8 / local
    network = device.network or Link(name="network", bandwidth=each, latency=_NETWORK_LATENCY)
    return device.model_copy(update={"network": network.model_copy(update={"bandwidth": each})})


def _over_pcie(device: Device, wire: str) -> Device:
    """``device`` linked to its peers over PCIe: directly or not, as the row says, else as in the catalog."""
    link, host = device.link, device.host_link
    if host and (link is None or "pci" not in link.name.lower()):
        link = host.model_copy(update={"bandwidth": _PCIE * host.bandwidth})
    if link and re.search(r"p2p|peer|host mem|shm|shared mem", wire):
        link = link.model_copy(update={"p2p": re.search(_NOT_DIRECT, wire) is None})
    return device.model_copy(update={"link": link})


def cases(row: CsvRow) -> list[Case]:
    """The row's prediction beside its measurement. Raises :class:`BadCell` or :class:`UserError`."""
    measured = row.number("seconds", above=0)
    cluster, op = cluster_of(row), op_of(row)
    timed = collective_time(op, cluster)
    device, n = cluster.device, op.ranks
    rounds = 2 if op.kind == "all_reduce" else 1
    wire = device.link.bandwidth if device.link else device.memory_bandwidth / 4
    if cluster.nodes > 1 and device.network:  # one card per rank of a node, side by side
        wire = min(wire, device.network.bandwidth * cluster.devices_per_node)
    terms = (rounds * (n - 1) / n * op.link_bytes / wire, 1e-6 * (n - 1), 1.0)
    return [
        Case(
            group=f"{device.name} {op.kind}", quantity="seconds", measured=measured, predicted=timed.seconds,
            label=f"{op.kind} of {op.link_bytes:.0f} bytes on {n} {device.name}", terms=terms, why=timed.bound,
            line=row.line, spread=timed.spread, source=timed.source,
        )
    ]  # fmt: skip
