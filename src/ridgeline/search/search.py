"""Branch and bound over the space of plans, on predictions.

Nodes (mesh × shape × micro-batch) are visited in the order of their bound: the computation alone. Below a node, the
bubbles of each split's schedule are added to it. What is left is sized first, and timed only when it fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ridgeline.predict.quick import quick
from ridgeline.search.expand import SLACK, Expansion, judge, ranked, require_metric
from ridgeline.search.found import KEPT, Answer, Found, Tried, miss, order
from ridgeline.search.nodes import SearchNode, Shape, bound_of, in_order, nodes
from ridgeline.search.question import Question
from ridgeline.search.settle import settle
from ridgeline.search.space import (
    GROUPS,
    MICRO_BATCHES,
    Set,
    Slots,
    batches,
    candidate,
    offloads,
    refusal,
    slots,
    splits_batch,
    sub_clusters,
)
from ridgeline.search.workers import count_nodes, in_processes, left_by_others, publish, take
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import techniques_of

_NOTHING = 1e-3
"""A technique that changes no metric by more does nothing."""

Progress = Callable[[int, int], None]


def search(
    question: Question, workers: int = 2, progress: Progress | None = None, first_feasible: bool = False
) -> Answer:
    """Search the space of plans for the question's goal; with ``first_feasible`` stop at the first feasible plan."""
    start = time.perf_counter()
    answer = None
    if question.training and "peak_bytes" in question.slo:
        answer = _beyond_memory(question, workers, progress, first_feasible)
    if not answer and question.goal in ("cost", "memory") and question.longest < math.inf:
        answer = _beyond_time(question, workers, progress)
    answer = answer or _search(question, workers, progress, first_feasible, bounded=first_feasible)
    answer.seconds = time.perf_counter() - start
    return answer


def _search(
    question: Question, workers: int, progress: Progress | None, first_feasible: bool, bounded: bool = False
) -> Answer:
    """``bounded``: what breaks a limit on time is not looked at, so that the closest miss is not known."""
    bases = [b for c in sub_clusters(question.cluster, question.goal == "cost") for b in _bases(question, c)]
    settled = settle(question, bases[0])
    known = [cls for cls in question.techniques() if cls.card.name not in settled.without_effect]
    spaces = [slots(question, base, known, settled.techniques, settled.names) for base in bases]
    shapes = [(i, mesh, shape) for i, space in enumerate(spaces) for mesh in space.combinations("mesh")
              for shape in space.combinations("shape")]  # fmt: skip
    workers = 1 if first_feasible else max(1, min(workers, len(shapes) // 2))
    found, before = Found(), 0
    for some in _by_offload(question, spaces):
        # What misses another limit than that of memory from the devices misses it by more from elsewhere.
        if found.kinds or ("peak_bytes" not in question.slo and any(t.quick.fits for t in found.nearest)):
            found.count("dominated", sum(some[i].below for i, _, _ in shapes))
            continue
        run = partial(_walk, question, bases, some, first_feasible=first_feasible, bounded=bounded)
        before += _walk_all(run, shapes, workers, progress, found, before)
    answer = Answer(question, found, settled.evidence, settled.without_effect, 0.0)
    if question.training and question.goal != "memory" and answer.best and not first_feasible:
        _look_around(question, bases, spaces, answer.best[0], found)
    for t in answer.best:
        found.kinds[t.kind] = without_idle(question, t, settled.techniques)
    if answer.best:
        used = {name for t in answer.best for name in t.names}
        answer.settled = {name: why for name, why in answer.settled.items() if name in used}
    if question.training and question.goal != "memory" and answer.best:  # beyond the bound's reach it is incomplete
        limit = SLACK * min(t.weighed(question) for t in answer.best)
        found.front = [t for t in found.front if t.weighed(question) <= limit]
    return answer


def _beyond_memory(q: Question, workers: int, progress: Progress | None, first_feasible: bool) -> Answer | None:
    """The answer where no plan keeps the limit on memory, whatever its time: the plans that take least. None: one does
    keep it. Plans past a limit that many keep are left out by bounds, but no bound tells which comes nearest."""
    alone = replace(q, goal="memory", slo={"peak_bytes": q.slo["peak_bytes"]})
    kept = _search(alone, 1, progress, first_feasible=True)
    if kept.best or first_feasible:
        return None if kept.best else replace(kept, question=q)
    least = _search(replace(alone, slo={}), workers, progress, first_feasible=False)
    if not least.best:
        return replace(least, question=q)
    counts = least.found.counts
    counts["missed"] += counts.pop("feasible", 0)
    found = Found(counts=counts, refusals=least.found.refusals)
    for t in sorted(least.found.fitting.values(), key=order)[:KEPT]:
        found.infeasible(Tried(t.experiment, t.quick, t.rank, q.misses(t.metrics), q.excess(t.metrics)))
    return Answer(q, found, {}, least.without_effect, 0.0)


def _beyond_time(q: Question, workers: int, progress: Progress | None) -> Answer | None:
    """The answer where no plan keeps the limits on a step's time: the fastest plans, which another goal does not look
    for. None: one does keep them."""
    found = []
    for cluster in sub_clusters(q.cluster, q.goal == "cost"):
        fastest = _search(replace(q, goal="throughput", cluster=cluster), workers, progress, first_feasible=True)
        if fastest.best:
            return None
        for t in fastest.found.nearest:
            if t.quick.fits:
                require_metric(q, t.experiment, t.quick)
        found.append(replace(fastest, question=q))
    return min(found, key=lambda a: miss(a.found.nearest[0]) if a.found.nearest else (True, math.inf, 0))


def _by_offload(q: Question, spaces: list[Slots]) -> list[list[Slots]]:
    """The spaces, or in serving those of what stays on the devices, and those of the rest for where nothing fits
    without it: copies of weights or caches in every iteration never beat another division of the model."""
    if q.workload.kind != "serve" or q.goal == "memory":
        return [spaces]
    near, far = ([replace(s, placements=tuple(p for p in s.placements if bool(offloads(p)) == away)) for s in spaces]
                 for away in (False, True))  # fmt: skip
    return [near, far]


def _walk_all(
    run: Callable[..., Found], shapes: list[Shape], workers: int, progress: Progress | None, found: Found, before: int
) -> int:
    """Walk over the shapes in ``workers`` processes, and merge what they find into ``found`` → how many nodes there
    were, behind ``before`` others in what ``progress`` is told."""
    total = 0

    def say(done: int, of: int) -> None:
        nonlocal total
        total = of
        if progress:
            progress(before + done, before + of)

    some = [run([shapes], 0, progress=say)] if workers == 1 else in_processes(run, shapes, workers, say)
    for one in some:
        found.merge(one)
    return total


def _look_around(q: Question, bases: list[Experiment], spaces: list[Slots], best: Tried, found: Found) -> None:
    """Time what differs from the best plan in one technique, however slow: the trades that the bound has left out."""
    at = next(i for i, b in enumerate(bases) if b.cluster == best.experiment.cluster)
    base, space = bases[at], spaces[at]
    own = [t for t in techniques_of(best.experiment.plan) if not base.plan.has(t.card.name)]
    for options in (slot for group in GROUPS for slot in space.choices[group]):
        kinds = {type(t) for t in options}
        for option in options:
            chosen = (*(t for t in own if type(t) not in kinds), *([option] if option else []))
            for times in (0.5, 1, 2, 4) if q.free_micro_batch else (1,):
                micro = best.experiment.micro_batch_size * times
                if micro < 1 or base.batch_size % micro:
                    continue
                e, techniques = candidate(base, chosen, int(micro))
                if not refusal((e, techniques), whole=True) and splits_batch(tuple(techniques)) == (
                    e.gradient_ranks > 1
                ):
                    judge(q, e, quick(e, techniques), found)


def without_idle(q: Question, t: Tried, always: Set) -> Tried:
    """The plan without those techniques among ``always`` that change no metric in it by ``_NOTHING``, or that are not
    proven and gain too little to come before the plan without them."""
    for technique in always:
        calls = tuple(c for c in t.experiment.plan.calls if c.name != technique.card.name)
        if len(calls) == len(t.experiment.plan.calls):
            continue
        plan = Plan.model_construct(calls=calls)
        e = t.experiment.model_copy(update={"plan": plan})
        if refusal((e, techniques_of(plan))):
            continue
        timed = quick(e, techniques_of(plan))
        if not timed.fits or q.misses(timed.metrics):
            continue
        without = ranked(q, e, timed)
        idle = all(abs(timed.metrics.get(k, math.inf) - v) <= _NOTHING * abs(v) for k, v in t.metrics.items())
        if idle or (technique.unproven(q.workload.kind) and order(without) < order(t)):
            t = without
    return t


def _bases(q: Question, cluster: Cluster) -> list[Experiment]:
    base = q.base(cluster)
    out = []
    for size in batches(base, q.free_batch):
        workload = q.workload.model_copy(update={"batch_size": size}) if size else q.workload
        out.append(base.model_copy(update={"workload": workload}))
    return out


def _walk(
    q: Question, bases: list[Experiment], spaces: list[Slots], parts: list[list[Shape]], own: int,
    first_feasible: bool = False, bounded: bool = False, progress: Progress | None = None,
) -> Found:  # fmt: skip
    """The nodes of this process in the order of their bounds, as far as they are in reach of the fastest plan; then
    what others have left of theirs."""
    found = Found()
    firsts = [sum(map(len, parts[:i])) * len(MICRO_BATCHES) for i in range(len(parts))]
    every = nodes(q, bases, spaces, parts[own], found, firsts[own])

    def reach() -> float:
        found.faster(math.inf)
        limit = q.longest * q.weight(bases[0].cluster) if bounded and len(bases) == 1 else math.inf
        return math.inf if q.goal == "memory" else min(limit, SLACK * found.fastest)

    def expand(node: SearchNode) -> None:
        Expansion(q, bases[node.base], spaces[node.base], node, found, bounded).run()
        count_nodes(1, 0)

    count_nodes(0, len(every))
    left = {n.index: n for n in every}
    for done, node in enumerate(in_order(q, bases, every, reach, publish), 1):
        del left[node.index]
        if take(node):
            expand(node)
        if progress:
            progress(done, len(every))
        if first_feasible and found.kinds:
            return found
    for node in filter(take, left.values()):
        found.count("bounded", spaces[node.base].below)
        count_nodes(1, 0)
    if progress:
        progress(len(every), len(every))
    for other in (i for i in range(len(parts)) if i != own):
        theirs = nodes(q, bases, spaces, parts[other], Found(), firsts[other])
        for node in left_by_others(theirs, reach):
            node.bound = bound_of(q, *candidate(bases[node.base], node.chosen, node.micro))
            publish(node, node.bound)
            if node.bound <= reach() and take(node):
                expand(node)
    return found
