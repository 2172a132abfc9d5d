"""The nodes of the search tree, in the order of what they need at least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from ridgeline.predict.quick import computation, least_bytes, prepare
from ridgeline.search.found import Found
from ridgeline.search.question import Question
from ridgeline.search.space import Set, Slots, candidate, micro_batches, refusal, with_settled
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Technique

SEEDS = 6
"""Nodes that are looked at first."""

Shape = tuple[int, Set, Set]
"""Index of the base experiment, mesh and shape."""


@dataclass(slots=True)
class SearchNode:
    """A mesh, a shape and a micro-batch size."""

    base: int
    mesh: Set
    chosen: Set
    """The mesh, the shape, and what is always on beside them."""
    micro: int | None
    index: int
    """Its place among all."""
    bound: float = math.nan
    """What it needs at least (:func:`bound_of`), once that is known."""


def nodes(
    q: Question, bases: list[Experiment], spaces: list[Slots], shapes: list[Shape], found: Found, first: int = 0
) -> list[SearchNode]:
    """Every mesh × shape × micro-batch, behind ``first`` others. If ``check`` refuses a node, its whole subtree is
    skipped."""
    out: list[SearchNode] = []
    for index, mesh, shape in shapes:
        base, space = bases[index], spaces[index]
        degree = math.prod(candidate(base, mesh)[0].parallel.values())
        refused = "" if base.cluster.size % degree == 0 else f"mesh: {degree} ranks do not divide {base.cluster.size}"
        refused = refused or refusal(candidate(base, mesh + shape))
        if refused:
            found.refuse(refused, space.below)
            continue
        chosen = with_settled(base, mesh + shape, space.settled)
        sizes = micro_batches(base, degree, q.free_micro_batch)
        if q.goal == "memory" and not q.slo.keys() - {"peak_bytes"}:  # a larger micro-batch only keeps more
            found.count("dominated", space.below * (len(sizes) - 1))
            sizes = sizes[:1]
        out += [SearchNode(index, mesh, chosen, micro, first + len(out) + i) for i, micro in enumerate(sizes)]
    return out


def in_order(
    q: Question,
    bases: list[Experiment],
    nodes: list[SearchNode],
    reach: Callable[[], float],
    publish: Callable[[SearchNode, float], None],
) -> Iterator[SearchNode]:
    """The nodes, each with its bound: first some small ones, which are likely to fit (a good plan prunes the rest),
    then all others in the order of their bounds, as long as these are within ``reach()``. Bounds by which they are
    ordered are told to ``publish``.

    What is recomputed only adds computation, so a node is first placed by the bound without it, which many share; its
    own is computed when it comes to the front.
    """
    known: dict[object, float] = {}

    def bound(n: SearchNode, chosen: Set) -> float:
        key = n.base, chosen, n.micro
        if key not in known:
            known[key] = bound_of(q, *candidate(bases[n.base], chosen, n.micro))
        return known[key]

    def below(n: SearchNode) -> float:
        adds = q.training and q.goal != "memory"
        return bound(n, tuple(t for t in n.chosen if t.phase != "recompute") if adds else n.chosen)

    def exact(n: SearchNode) -> float:
        n.bound = bound(n, n.chosen)
        return n.bound

    def by_bound(some: list[SearchNode]) -> Iterator[SearchNode]:
        heap = [(below(n), i, False) for i, n in enumerate(some)]
        for least, i, _ in heap:
            publish(some[i], least)
        heapify(heap)
        while heap and heap[0][0] <= reach():
            least, i, final = heappop(heap)
            if exact(some[i]) <= least or final:
                yield some[i]
            else:
                heappush(heap, (exact(some[i]), i, True))

    seen = set()
    for n in islice(by_bound([n for n in nodes if (n.micro or 1) <= 2]), SEEDS):
        seen.add(id(n))
        yield n
    yield from by_bound([n for n in nodes if id(n) not in seen])


def bound_of(q: Question, e: Experiment, techniques: list[Technique]) -> float:
    """Least (weighed) seconds of what is below a node; with goal memory bytes instead, which only order the nodes."""
    if not q.training:
        return 0.0
    if q.goal == "memory":
        return least_bytes(prepare(e, techniques), e)
    return computation(e, techniques) * q.weight(e.cluster)
