"""Communication of a step: calls and bytes of every kind of collective in the graph; measured counts must be equal."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.graph.graph import Graph, Op, alternate

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "p2p", "broadcast", "reduce")


def buckets(sizes: list[tuple[int, float]], limit: float) -> list[list[int]]:
    """Which of consecutive gradients, each (kind, bytes), share a bucket: in order, by kind, up to ``limit`` bytes.

    A bucket is closed before it would become too large; a single gradient may be larger.
    """
    open_: dict[int, tuple[list[int], float]] = {}
    out: list[list[int]] = []
    for i, (kind, size) in enumerate(sizes):
        members, held = open_.get(kind, ([], 0.0))
        if members and held + size > limit:
            members, held = [], 0.0
        if not members:
            out.append(members)
        members.append(i)
        open_[kind] = (members, held + size)
    return out


def step_ops(g: Graph) -> list[tuple[Op, float]]:
    """Every operator of one step with the number of times it runs on a rank (with a pipeline: on the mean rank)."""
    out: list[tuple[Op, float]] = []
    for b in g.blocks:
        n = b.repeat * g.accumulation * g.passes / g.stages
        once = b.repeat * g.passes / g.stages
        gathers = n
        if g.layer_gathers is not None:
            gathers = once * (g.layer_gathers if b.is_layer else 1.0)
        for group, times in ((b.gather_forward, gathers), (b.forward, n), (b.store, n), (b.gather_backward, gathers),
                             (b.backward, n), (b.reduce, n if g.reduce_every_micro_batch else once),
                             (b.after_update, b.repeat / g.stages)):  # fmt: skip
            out += [(op, times) for op in group]
    out += [(op, 1) for op in (*g.update, *g.after_update)]
    pipe = g.pipeline
    if pipe and pipe.send:
        out.append((pipe.send, 2 * g.accumulation * (pipe.degree * pipe.chunks - 1) / pipe.degree))
    return out


def traffic(g: Graph) -> dict[tuple[str, int], tuple[float, float]]:
    """(kind, ranks) → (calls, bytes) of one step on one rank; with a pipeline the mean over its ranks.

    Bytes are those of the full buffer on one rank: the output of an all-gather, the input of a reduce-scatter, what a
    rank sends to its experts. A pass around a ring of c ranks is c - 1 messages of its part.
    """
    sums: dict[tuple[str, int], tuple[float, float]] = {}

    def add(kind: str, ranks: int, calls: float, size: float) -> None:
        if ranks > 1 and calls:
            old = sums.get((kind, ranks), (0.0, 0.0))
            sums[kind, ranks] = (old[0] + calls, old[1] + size)

    for op, n in step_ops(g):
        if op.kind == "ring":
            hops = (op.ranks - 1) * n
            add("p2p", op.ranks, hops, hops * op.link_bytes / op.ranks)
        elif op.kind == "p2p":
            add("p2p", g.stages, n, n * op.link_bytes)
        elif op.kind in COLLECTIVES and not (g.bucket_bytes and op.axis == "dp"):
            add(op.kind, op.ranks, n, n * op.link_bytes)
    for kind, ranks, calls, size in _bucketed(g):
        add(kind, ranks, calls, size)
    return sums


def _bucketed(g: Graph) -> Iterator[tuple[str, int, float, float]]:
    """(kind, ranks, calls, bytes) of bucketed gradients, once per step; the mean over stages."""
    if not g.bucket_bytes:
        return
    ranks = max((op.ranks for b in g.blocks for op in b.reduce if op.axis == "dp"), default=1)
    if ranks < 2:
        return
    pipe = g.pipeline
    stages = g.cut(pipe.degree * pipe.chunks) if pipe else [g.blocks]
    degree = pipe.degree if pipe else 1
    for rank in range(degree):
        own = [b for stage in stages[rank::degree] for b in stage]
        order = [own[i] for i, n in alternate(own) for _ in range(n)]
        tensors = [(p.spread, p.numel * p.grad_bytes) for b in order for p in b.params if p.trainable]
        tensors.reverse()
        for members in buckets(tensors, g.bucket_bytes):
            among, size = ranks // tensors[members[0]][0], sum(tensors[i][1] for i in members)
            if not g.byte_sums:
                yield "all_reduce", among, 1 / degree, size / degree
            else:  # scales, codes to those who sum them, scales of the sums, their codes (arXiv:2310.18313)
                codes = -(-size / 4 // among) * among
                yield "all_reduce", among, 2 / degree, 2 * 4.0 * len(members) / degree
                yield "alltoall", among, 1 / degree, codes / degree
                yield "all_gather", among, 1 / degree, codes / degree
