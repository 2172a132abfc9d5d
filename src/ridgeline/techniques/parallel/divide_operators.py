"""Shared code of the parallel techniques: dividing operators over ranks, and the collectives that reduce gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.graph.graph import Block, Op, Saved, changed

ATTENTION_CORE = ("scores", "mask", "softmax", "values", "values.dprobs", "values.dv", "softmax.bwd", "scores.dq",
                  "scores.dk", "soft_cap", "soft_cap.bwd", "q_rope", "k_rope", "q_rope.bwd", "k_rope.bwd",
                  "absorb", "expand", "join", "join.bwd")  # fmt: skip


def split_gemm(op: Op, m: int = 1, n: int = 1, k: int = 1) -> Op:
    """A GEMM op with its dimensions (those of ``op.shape``) divided; FLOPs and bytes follow."""
    rows, cols, inner = op.shape
    small = (max(1, rows // m), max(1, cols // n), max(1, inner // k))
    whole, part = float(rows * (inner + cols)), float(small[0] * (small[1] + small[2]))
    weights = op.weight_bytes * small[1] * small[2] / (cols * inner)
    if not op.weight_bytes:
        whole, part = whole + cols * inner * op.experts, part + small[1] * small[2] * op.experts
    moved = (op.bytes - op.weight_bytes) * part / whole + weights
    return changed(op, flops=op.flops / (m * n * k), bytes=moved, weight_bytes=weights, shape=small)


def split_bytes(op: Op, by: float, **values: Any) -> Op:
    """An elementwise op over a factor of ``by`` fewer elements, and with other ``values`` in some fields."""
    return changed(op, flops=op.flops / by, bytes=op.bytes / by, weight_bytes=op.weight_bytes / by, **values)


def split_saved(b: Block, names: Iterable[str], by: float) -> None:
    """Divide some of the saved activations of a block."""
    for name in names:
        if name in b.saved:
            old = b.saved[name]
            b.saved[name] = Saved(old.bytes / by, old.users)


def reductions(b: Block, kind: str, ranks: int, stride: int = 1) -> list[Op]:
    """Gradient reductions of a block over ``ranks`` data-parallel ranks; experts are reduced over fewer."""
    sizes: dict[int, float] = {}
    for p in b.params:
        if p.trainable:
            sizes[p.spread] = sizes.get(p.spread, 0.0) + p.numel * p.grad_bytes
    return [
        Op(kind, "communication", kind, "backward", bytes=size, link_bytes=size, ranks=max(1, ranks // spread),
           axis="dp", stride=stride * spread)
        for spread, size in sizes.items()
        if ranks // spread > 1
    ]  # fmt: skip


def host_copy(name: str, kind: str, size: float, direction: str) -> Op:
    """A copy between the device and its host's memory or disk: kind d2h, h2d, disk_read or disk_write."""
    return Op(name, "communication", kind, direction, bytes=size, link_bytes=size, axis="host")
