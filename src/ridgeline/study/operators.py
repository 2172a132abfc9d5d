"""Operators alone: a product, a collective or a copy by size, as the predictor times it."""

from __future__ import annotations

from typing import Literal

from ridgeline.graph.graph import Op
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.host_work import host_time
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.device import DTYPE_BYTES, Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.study import Axis

Operator = Literal["gemm", "all_reduce", "all_gather", "reduce_scatter", "device_copy", "host_copy", "disk_copy"]
DTYPE = "bf16"


def operator_metrics(kind: Operator, place: dict[str, Axis], cluster: Cluster) -> dict[str, float]:
    """Seconds, and the rate that they come to. ``place``: ``m``, ``n``, ``k`` of a product (bf16); ``bytes`` and, of a
    collective, ``ranks``: bytes of the whole buffer on one rank, and the bus bandwidth of NCCL's own tests. Copies are
    made by every device of a node at once."""
    if kind == "gemm":
        m, n, k = (int(place[x]) for x in "mnk")
        flops = 2.0 * m * n * k
        moved = float(m * k + n * k + m * n) * DTYPE_BYTES[DTYPE]
        seconds = op_time(Op("gemm", "mlp", "gemm", flops=flops, bytes=moved, dtype=DTYPE, shape=(m, n, k)),
                          cluster.device).seconds  # fmt: skip
        return {"operator_s": seconds, "flops_per_s": flops / seconds}
    size = float(place["bytes"])
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
        ranks = int(place.get("ranks", cluster.size))
        if ranks < 2:
            raise Incompatible("a collective needs two ranks", "choose ranks = 2 or more")
        op = Op(kind, "communication", kind, link_bytes=size, ranks=ranks, axis="dp", dtype=DTYPE)
        seconds = collective_time(op, cluster).seconds
        return {"operator_s": seconds, "bandwidth_bytes_per_s": bandwidth(kind, size, ranks, seconds)}
    if kind == "device_copy":
        seconds = op_time(Op("copy", "other", "copy", bytes=2 * size, dtype=DTYPE), cluster.device).seconds
    else:
        op = Op("copy", "other", "h2d" if kind == "host_copy" else "disk_read", link_bytes=size, dtype=DTYPE)
        seconds = host_time(op, cluster).seconds
    return {"operator_s": seconds, "bandwidth_bytes_per_s": bandwidth(kind, size, 1, seconds)}


def bandwidth(kind: Operator, size: float, ranks: int, seconds: float) -> float:
    """Bytes/s of a copy of ``size`` bytes, or the bus bandwidth of a collective: what each link carries, so that it
    does not depend on the number of ranks (NCCL's own tests)."""
    if kind not in ("all_reduce", "all_gather", "reduce_scatter"):
        return size / seconds
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size / seconds
