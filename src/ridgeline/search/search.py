"""Branch and bound over the space of plans, on predictions.

Nodes (mesh × shape × micro-batch) are visited in the order of their bound: the computation alone. Below a node, the
first placement of every split is timed in full; its computation, bubbles included, bounds the other placements. What
is left is sized first, and timed only when it fits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

from ridgeline.graph import Graph
from ridgeline.predict.quick import Quick, computation, prepare, quick, split
from ridgeline.search.question import Question
from ridgeline.search.space import (
    Set,
    Slots,
    batches,
    candidate,
    micro_batches,
    offloads,
    slots,
    splits_batch,
    sub_clusters,
    with_settled,
)
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import check_techniques, mesh_axes
from ridgeline.techniques.technique import Technique

KEPT = 5
"""Answers."""
SLACK = 1.1
"""Plans whose bound is this many times slower than the best found are not looked at: also the reach of the front."""

SEEDS = 6
"""Nodes that are looked at first."""

Progress = Callable[[int, int], None]
Shape = tuple[int, Set, Set]
"""Index of the base experiment, mesh and shape."""


@dataclass(slots=True)
class Tried:
    """One plan that was predicted."""

    experiment: Experiment
    quick: Quick
    rank: float
    missed: list[str] = field(default_factory=list)
    """Limits it breaks."""
    excess: float = 0.0
    """By what factor it breaks the worst of them."""

    @property
    def metrics(self) -> dict[str, float]:
        """Its predicted metrics."""
        return self.quick.metrics

    @property
    def over(self) -> float:
        """Peak memory over what the device has."""
        return self.metrics["peak_bytes"] / self.quick.limit

    def weighed(self, q: Question) -> float:
        """Seconds of a training step, weighed as the goal does."""
        return self.metrics["step_time_s"] * q.weight(self.experiment.cluster)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same plan, batch and cluster."""
        e = self.experiment
        return e.cluster.label, e.batch_size, e.micro_batch_size, tuple(e.plan.strings())

    def idles_beside(self, other: Tried) -> bool:
        """Whether it is the other plan, or the other plan with techniques more that change nothing."""
        same = self.rank == other.rank and self.metrics["peak_bytes"] == other.metrics["peak_bytes"]
        return self.key == other.key or (same and self.key[:3] == other.key[:3] and other.names < self.names)

    @property
    def names(self) -> frozenset[str]:
        """Techniques that are on."""
        return frozenset(c.name for c in self.experiment.plan.calls)


@dataclass(slots=True)
class Found:
    """What a part of the search saw."""

    best: list[Tried] = field(default_factory=list)
    front: list[Tried] = field(default_factory=list)
    """Not beaten in both the goal and memory, among plans at most ``SLACK`` times slower than the best."""
    with_technique: dict[str, Tried] = field(default_factory=dict)
    """The best feasible plan that has the technique on."""
    simplest: Tried | None = None
    """The feasible plan with the fewest techniques."""
    nearest: list[Tried] = field(default_factory=list)
    """Infeasible plans that miss by least."""
    counts: Counter[str] = field(default_factory=Counter)
    """considered, and of them refused, bounded, dominated, oversize, missed (a limit) and feasible."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Reasons of ``check``."""

    fastest: float = math.inf
    """Seconds of the fastest plan that fits, weighed as the goal does."""

    smallest: float = math.inf
    """Peak bytes of the smallest plan that fits."""

    def count(self, what: str, n: int) -> None:
        """Account for ``n`` candidates."""
        self.counts["considered"] += n
        self.counts[what] += n

    def faster(self, seconds: float) -> None:
        """Take in a plan's (weighed) seconds, and what other workers found."""
        self.fastest = min(self.fastest, seconds)
        for shared in _shared:
            with shared.get_lock():
                shared.value = self.fastest = min(self.fastest, shared.value)

    def refuse(self, reason: str, n: int) -> None:
        """Account for ``n`` candidates that ``check`` refuses."""
        self.count("refused", n)
        self.refusals[reason] += n

    def feasible(self, t: Tried) -> None:
        """Take in a plan that fits and keeps the limits."""
        if len(self.best) < KEPT or t.rank <= self.best[-1].rank:
            ranked = sorted([*self.best, t], key=_order)
            self.best = [o for i, o in enumerate(ranked) if not any(o.idles_beside(p) for p in ranked[:i])][:KEPT]
        if self.simplest is None or (len(t.names), *_order(t)) < (len(self.simplest.names), *_order(self.simplest)):
            self.simplest = t
        for name in t.names:
            if name not in self.with_technique or _order(t) < _order(self.with_technique[name]):
                self.with_technique[name] = t
        peak = t.metrics["peak_bytes"]
        if not any(o.rank <= t.rank and o.metrics["peak_bytes"] <= peak for o in self.front):
            self.front = [o for o in self.front if o.rank < t.rank or o.metrics["peak_bytes"] < peak] + [t]

    def infeasible(self, t: Tried) -> None:
        """Take in a plan that does not fit or misses a limit; the nearest are kept."""
        if len(self.nearest) == KEPT and _miss(self.nearest[-1]) <= _miss(t):
            return
        if all(o.key != t.key for o in self.nearest):
            self.nearest = sorted([*self.nearest, t], key=_miss)[:KEPT]

    def merge(self, other: Found) -> None:
        """Take in another part's."""
        feasible = [*other.best, *other.front, *other.with_technique.values()]
        for t in feasible + ([other.simplest] if other.simplest else []):
            self.feasible(t)
        for t in other.nearest:
            self.infeasible(t)
        self.counts += other.counts
        self.refusals += other.refusals


@dataclass(slots=True)
class Answer:
    """The planner's answer."""

    question: Question
    found: Found
    settled: dict[str, str]
    """Techniques that were better in time and memory in every trial, and so are always on; with the evidence."""
    seconds: float

    @property
    def best(self) -> list[Tried]:
        """Up to five feasible plans, best first."""
        return self.found.best


def _miss(t: Tried) -> tuple[bool, float, int]:
    return t.over > 1, t.over if t.over > 1 else t.excess, len(t.names)


def _order(t: Tried) -> tuple[float, float, int, list[str]]:
    return t.rank, t.metrics["peak_bytes"], len(t.names), t.experiment.plan.strings()


def search(
    question: Question, workers: int = 2, progress: Progress | None = None, first_feasible: bool = False
) -> Answer:
    """Search the space of plans for the question's goal; with ``first_feasible`` stop at the first feasible plan."""
    start = time.perf_counter()
    bases = [b for c in sub_clusters(question.cluster, question.goal == "cost") for b in _bases(question, c)]
    settled = _settle(question, bases[0])
    spaces = [slots(base, question.techniques(), tuple(t for t, _ in settled)) for base in bases]
    shapes = [(i, mesh, shape) for i, space in enumerate(spaces) for mesh in space.combinations("mesh")
              for shape in space.combinations("shape")]  # fmt: skip
    workers = 1 if first_feasible else max(1, min(workers, len(shapes) // 8))
    run = partial(_walk, question, bases, spaces, first_feasible=first_feasible)
    found = Found()
    if workers == 1:
        found.merge(run(shapes, progress=progress))
    else:
        fork = get_context("fork")
        with ProcessPoolExecutor(workers, fork, _share, (fork.Value("d", math.inf),)) as pool:
            for done, part in enumerate(pool.map(run, [shapes[i::workers] for i in range(workers)]), 1):
                found.merge(part)
                if progress:
                    progress(done, workers)
    if question.training and question.goal != "memory" and found.best:  # beyond the bound's reach it is no front
        found.front = [t for t in found.front if t.weighed(question) <= SLACK * found.best[0].weighed(question)]
    return Answer(question, found, {t.card.name: why for t, why in settled}, time.perf_counter() - start)


_shared: list[Any] = []
"""In a worker: the fastest plan that any worker has found, in (weighed) seconds."""


def _share(fastest: Any) -> None:
    _shared[:] = [fastest]


def _bases(q: Question, cluster: Cluster) -> list[Experiment]:
    base = Experiment.model_construct(model=q.model, cluster=cluster, workload=q.workload)
    out = []
    for size in batches(base, q.free_batch):
        workload = q.workload.model_copy(update={"batch_size": size}) if size else q.workload
        out.append(base.model_copy(update={"workload": workload}))
    return out


@dataclass(slots=True)
class SearchNode:
    """A mesh, a shape and a micro-batch size, with the least (weighed) seconds that any plan with them takes."""

    base: int
    chosen: Set
    micro: int | None
    bound: float


def _nodes(
    q: Question, bases: list[Experiment], spaces: list[Slots], shapes: list[Shape], found: Found
) -> Iterator[SearchNode]:
    """Every mesh × shape × micro-batch with its bound. What ``check`` refuses takes its whole subtree along."""
    for index, mesh, shape in shapes:
        base, space = bases[index], spaces[index]
        degree = math.prod(mesh_axes(base.task, mesh).values())
        refused = "" if base.cluster.size % degree == 0 else f"mesh: {degree} ranks do not divide {base.cluster.size}"
        refused = refused or _refusal(candidate(base, mesh + shape))
        if refused:
            found.refuse(refused, space.below)
            continue
        chosen = with_settled(base, mesh + shape, space.settled)
        sizes = micro_batches(base, degree, q.free_micro_batch)
        if q.goal == "memory" and not q.slo:  # a larger micro-batch only keeps more
            found.count("dominated", space.below * (len(sizes) - 1))
            sizes = sizes[:1]
        for micro in sizes:
            bound = computation(*candidate(base, chosen, micro)) * q.weight(base.cluster) if q.training else 0.0
            yield SearchNode(index, chosen, micro, bound)


def _refusal(point: tuple[Experiment, list[Technique]]) -> str:
    try:
        check_techniques(*point)
    except Incompatible as refusal:
        return str(refusal)
    return ""


def _walk(
    q: Question, bases: list[Experiment], spaces: list[Slots], shapes: list[Shape], first_feasible: bool = False,
    progress: Progress | None = None,
) -> Found:  # fmt: skip
    """The nodes in order of their bounds; once a bound is out of reach, so are all after it."""
    found = Found()
    nodes = sorted(_nodes(q, bases, spaces, shapes, found), key=lambda n: n.bound)
    small = [n for n in nodes if (n.micro or 1) <= 2][:SEEDS]  # they are likely to fit, and a good plan prunes the rest
    nodes = small + [n for n in nodes if n not in small]
    for done, node in enumerate(nodes):
        found.faster(math.inf)
        if node.bound > SLACK * found.fastest and q.goal != "memory":
            found.count("bounded", spaces[node.base].below)
            continue
        _expand(q, bases[node.base], spaces[node.base], node, found)
        if progress:
            progress(done + 1, len(nodes))
        if first_feasible and found.best:
            break
    return found


def _expand(q: Question, base: Experiment, space: Slots, node: SearchNode, found: Found) -> None:
    """Every split and placement of a node. Offloading is only tried where no other placement fits."""
    core = prepare(*candidate(base, node.chosen, node.micro)) if q.training else None
    for chosen in space.combinations("split"):
        e, techniques = candidate(base, node.chosen + chosen, node.micro)
        refused = _refusal((e, techniques))
        if refused:
            found.refuse(refused, len(space.placements))
            continue
        parallel = q.training and e.data_parallel > 1
        placements = [p for p in space.placements if not q.training or splits_batch(p) == parallel]
        if len(placements) < len(space.placements):
            why = "placement: gradients are reduced exactly where there are several data-parallel ranks"
            found.refuse(why, len(space.placements) - len(placements))
        _place(q, base, node, chosen, placements, split(core, e, techniques) if core else None, found)


def _place(
    q: Question,
    base: Experiment,
    node: SearchNode,
    stages: Set,
    placements: list[Set],
    prepared: Graph | None,
    found: Found,
) -> None:
    """The placements of one split into stages: those that offload come last."""
    everything = q.goal == "memory"
    floor = kept = 0.0  # least seconds of any of them; bytes that only offloading moves
    fits = False
    for done, placement in enumerate(placements):
        if floor > SLACK * found.fastest and not everything:
            found.count("bounded", len(placements) - done)
            return
        if fits and offloads(placement) and not everything:
            found.count("dominated", len(placements) - done)
            return
        if kept > base.cluster.device.memory_bytes and not offloads(placement):
            found.count("oversize", 1)
            continue
        if everything and kept > found.smallest and not offloads(placement):
            found.count("bounded", 1)
            continue
        e, techniques = candidate(base, node.chosen + stages + placement, node.micro)
        refused = _refusal((e, techniques))
        if refused:
            found.refuse(refused, 1)
            continue
        timed = quick(e, techniques, always=not floor and q.training, prepared=prepared)
        weight = q.weight(base.cluster)
        floor = floor or timed.floor * weight
        if not offloads(placement):
            kept = max(kept, timed.peak.get("activations", 0.0) + timed.peak.get("temporaries", 0.0))
        if _judge(q, e, timed, found):
            fits = True
            found.smallest = min(found.smallest, timed.metrics["peak_bytes"])
            found.faster(timed.metrics.get("step_time_s", math.inf) * weight)


def _judge(q: Question, e: Experiment, timed: Quick, found: Found) -> bool:
    """Take in a prediction; whether it fits and keeps the limits."""
    if not timed.fits:
        found.count("oversize", 1)
        found.infeasible(Tried(e, timed, math.inf))
        return False
    missed = q.misses(timed.metrics)
    if q.metric not in timed.metrics:
        raise UserError(f"goal {q.goal!r} needs {q.metric}, which is not predicted for {e.cluster.device.name}",
                        "give the device a price_per_hour, or choose another goal")  # fmt: skip
    t = Tried(e, timed, q.rank(timed.metrics), missed, q.excess(timed.metrics))
    if missed:
        found.count("missed", 1)
        found.infeasible(t)
    else:
        found.count("feasible", 1)
        found.feasible(t)
    return not missed


def _settle(q: Question, base: Experiment) -> list[tuple[Technique, str]]:
    """Lossless techniques without options that are better in time and memory in every trial: no need to branch.

    Trials are made beside every other technique, and on top of the one that shortens computation most.
    """
    known = q.techniques()
    micro = 1 if q.training and q.free_micro_batch else None

    def metrics(chosen: Set) -> dict[str, float] | None:
        point = candidate(base, chosen, micro)
        return None if _refusal(point) else quick(*point, always=True).metrics

    key = "step_time_s" if q.training else "e2e_s"
    singles = [t for c in known for t in c.choices(base)[:2]]
    tried = [(m[key], t) for t in singles if t.phase == "compile" and (m := metrics((t,))) and key in m]
    lead = min(tried, key=lambda x: x[0])[1] if tried else None
    settled: list[tuple[Technique, str]] = []
    for cls in known:
        options = cls.choices(base)
        if not cls.card.lossless or len(options) != 1 or options[0].axes():
            continue
        trials = wins = 0
        for other in [(), *((t,) for t in singles if type(t) not in (cls, type(lead)))]:
            start = (*other, lead) if lead is not None and type(lead) is not cls else other
            off, on = metrics(start), metrics((*start, options[0]))
            if off and on and key in off and key in on:
                trials += 1
                wins += on[key] <= off[key] and on["peak_bytes"] <= off["peak_bytes"]
        if trials and wins == trials:
            settled.append((options[0], f"never slower nor larger in {trials} trials"))
    return settled
