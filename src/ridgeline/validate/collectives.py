"""Measured collectives: ``device,op,dtype,ranks,bytes,link,seconds``; bytes are nccl-tests' total buffer."""

from __future__ import annotations

from ridgeline import catalog
from ridgeline.graph.graph import Op
from ridgeline.predict.collective import collective_time
from ridgeline.spec.device import Cluster
from ridgeline.validate.case import Case
from ridgeline.validate.dtypes import dtype_of
from ridgeline.validate.table import BadCell, Row

NAME = "collectives"
REQUIRED = ("device", "op", "ranks", "bytes", "seconds")

_NAMES = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "reducescatter": "reduce_scatter", "alltoall": "alltoall",
    "all_to_all": "alltoall", "broadcast": "broadcast", "p2p": "p2p", "sendrecv": "p2p", "send_recv": "p2p",
}  # fmt: skip
_NODE = 8
"""Devices of a node, where the row says that the group spans nodes and not how many there are."""


def op_of(row: Row) -> Op:
    """The collective of one row."""
    name = row.text("op").lower()
    if name not in _NAMES:
        raise BadCell(f"column 'op': {name!r} is none of {', '.join(sorted(set(_NAMES.values())))}")
    size = row.number("bytes", above=0)
    return Op(
        name, "communication", _NAMES[name], dtype=dtype_of(row, "dtype", "bf16"), link_bytes=size,
        ranks=row.count("ranks", least=2), axis="tp",
    )  # fmt: skip


def cluster_of(row: Row) -> Cluster:
    """One node of as many devices as ranks, or nodes of eight when the row's link is between nodes."""
    device, ranks = catalog.device(row.text("device")), row.count("ranks", least=2)
    if row.text("link", "intra-node").lower().startswith("inter") and ranks > 1:
        local = row.count("devices_per_node", _NODE if ranks > _NODE else 1)
        return Cluster(device=device, devices_per_node=local, nodes=-(-ranks // local))
    return Cluster(device=device, devices_per_node=ranks)


def cases(row: Row) -> list[Case]:
    """The row's prediction beside its measurement. Raises :class:`BadCell` or :class:`UserError`."""
    measured = row.number("seconds", above=0)
    cluster, op = cluster_of(row), op_of(row)
    timed = collective_time(op, cluster)
    device, n = cluster.device, op.ranks
    rounds = 2 if op.kind == "all_reduce" else 1
    wire = device.link.bandwidth if device.link else device.memory_bandwidth / 4
    terms = (rounds * (n - 1) / n * op.link_bytes / wire, 1e-6 * (n - 1), 1.0)
    return [
        Case(
            group=f"{device.name} {op.kind}", quantity="seconds", measured=measured, predicted=timed.seconds,
            label=f"{op.kind} of {op.link_bytes:.0f} bytes on {n} {device.name}", terms=terms, why=timed.bound,
            line=row.line,
        )
    ]  # fmt: skip
