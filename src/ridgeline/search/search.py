"""Branch and bound over the space of plans, on predictions.

Per layout and shape one placement is timed in full; its computation bounds every other placement from below. What the
bound leaves is sized first and timed only when it fits. Deterministic: workers share no incumbents but those of the
first pass.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from ridgeline.predict.quick import Quick, quick
from ridgeline.search.question import Question
from ridgeline.search.space import Set, Slots, batches, candidate, micro_batches, slots, sub_clusters
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import check

KEPT = 5
"""Answers."""
SLACK = 1.5
"""Plans whose bound is this many times slower than the best found are not looked at: also the reach of the front."""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Tried:
    """One plan that was predicted."""

    experiment: Experiment
    quick: Quick
    rank: float
    missed: list[str] = field(default_factory=list)
    """Limits it breaks."""

    @property
    def metrics(self) -> dict[str, float]:
        """Its predicted metrics."""
        return self.quick.metrics

    @property
    def over(self) -> float:
        """Peak memory over what the device has."""
        return self.metrics["peak_bytes"] / self.quick.limit

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same plan, batch and cluster."""
        e = self.experiment
        return e.cluster.label, e.batch_size, e.micro_batch_size, tuple(e.plan.strings())

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
    """considered, refused, bounded (cut by the bound), oversize, missed (a limit), feasible, timed."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Reasons of ``check``."""

    def feasible(self, t: Tried) -> None:
        """Take in a plan that fits and keeps the limits."""
        if all(o.key != t.key for o in self.best):
            self.best = heapq.nsmallest(KEPT, [*self.best, t], key=_order)
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
        if all(o.key != t.key for o in self.nearest):
            self.nearest = heapq.nsmallest(KEPT, [*self.nearest, t], key=lambda x: (x.over > 1, x.over, x.missed))

    def merge(self, other: Found) -> None:
        """Take in another part's."""
        seen = [*other.best, *other.front, *other.with_technique.values()]
        for t in seen + ([other.simplest] if other.simplest else []):
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


def _order(t: Tried) -> tuple[float, float, list[str]]:
    return t.rank, t.metrics["peak_bytes"], t.experiment.plan.strings()


def search(question: Question, workers: int = 2, progress: Progress | None = None, any_will_do: bool = False) -> Answer:
    """Search the space of plans for the question's goal; with ``any_will_do`` stop at the first feasible plan."""
    start = time.perf_counter()
    bases = [b for c in sub_clusters(question.cluster, question.goal == "cost") for b in _bases(question, c)]
    settled = _settle(question, bases[0])
    parts: list[tuple[Experiment, Slots, Set]] = []
    for base in bases:
        space = slots(base, question.techniques(), frozenset(settled))
        parts += [(base, space, layout) for layout in space.layouts()]
    first = Found()
    if any_will_do:
        workers = 1
    for base, space, layout in parts:  # a quick pass for incumbents: the first shape and placement of every layout
        _explore(question, base, space, layout, [], brief=True, found=first)
    incumbent = [t.metrics.get("step_time_s", 0.0) for t in first.best]
    run = partial(_part, question, incumbents=incumbent)
    found = Found()
    for done, part in enumerate(_each(run, parts, workers), 1):
        found.merge(part)
        if any_will_do and found.best:
            break
        if progress:
            progress(done, len(parts))
    if question.training and question.goal != "memory" and found.best:  # beyond the bound's reach it is no front
        reach = SLACK * min(t.metrics["step_time_s"] for t in found.best)
        found.front = [t for t in found.front if t.metrics["step_time_s"] <= reach]
    return Answer(question, found, settled, time.perf_counter() - start)


def _each(
    run: Callable[[tuple[Experiment, Slots, Set]], Found], parts: list[tuple[Experiment, Slots, Set]], workers: int
) -> Iterable[Found]:
    if workers < 2 or len(parts) < 4:
        yield from map(run, parts)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        yield from pool.map(run, parts, chunksize=max(1, len(parts) // (8 * workers)))


def _part(question: Question, part: tuple[Experiment, Slots, Set], incumbents: list[float]) -> Found:
    base, space, layout = part
    found = Found()
    _explore(question, base, space, layout, incumbents, brief=False, found=found)
    return found


def _bases(q: Question, cluster: Cluster) -> list[Experiment]:
    base = Experiment.model_construct(model=q.model, cluster=cluster, workload=q.workload)
    out = []
    for size in batches(base, q.free_batch):
        workload = q.workload.model_copy(update={"batch_size": size}) if size else q.workload
        out.append(base.model_copy(update={"workload": workload}))
    return out


def _explore(
    q: Question, base: Experiment, space: Slots, layout: Set, incumbents: list[float], brief: bool, found: Found
) -> None:
    """All shapes, micro-batches and placements of one layout."""
    best = min(incumbents, default=float("inf"))
    degree = 1
    for t in layout:
        for n in t.axes().values():
            degree *= n
    if base.cluster.size % degree:
        n = sum(1 for _ in space.shapes()) * sum(1 for _ in space.placements())
        found.counts["considered"] += n
        found.counts["refused"] += n
        found.refusals[f"degrees that do not divide the {base.cluster.size} devices"] += n
        return
    placements = list(space.placements())
    for shape in space.shapes():
        e, _ = candidate(base, layout + shape)
        sizes = micro_batches(e, q.free_micro_batch)
        for micro in sizes[:1] if brief else sizes:
            floor: float | None = None
            for placement in placements:
                found.counts["considered"] += 1
                e, made = candidate(base, layout + shape + placement, micro)
                try:
                    check(e)
                except Incompatible as refusal:
                    found.counts["refused"] += 1
                    found.refusals[str(refusal)] += 1
                    continue
                if floor is not None and floor > SLACK * best and q.goal != "memory":
                    found.counts["bounded"] += 1
                    continue
                timed = quick(e, made, always=floor is None and q.training)
                if floor is None:
                    floor = timed.floor
                _judge(q, e, timed, found)
                if timed.fits and "step_time_s" in timed.metrics and not brief:
                    best = min(best, timed.metrics["step_time_s"])
                if brief:
                    break
            if brief and found.best:
                break


def _judge(q: Question, e: Experiment, timed: Quick, found: Found) -> None:
    if not timed.fits:
        found.counts["oversize"] += 1
        found.infeasible(Tried(e, timed, float("inf")))
        return
    missed = q.misses(timed.metrics)
    if q.metric not in timed.metrics:
        raise UserError(f"goal {q.goal!r} needs {q.metric}, which is not predicted for {e.cluster.device.name}",
                        "give the device a price_per_hour, or choose another goal")  # fmt: skip
    t = Tried(e, timed, q.rank(timed.metrics), missed)
    if missed:
        found.counts["missed"] += 1
        found.infeasible(t)
    else:
        found.counts["feasible"] += 1
        found.feasible(t)


def _settle(q: Question, base: Experiment) -> dict[str, str]:
    """Lossless techniques without options that are better in time and memory in every trial: no need to branch."""
    settled: dict[str, str] = {}
    known = q.techniques()
    for cls in known:
        options = cls.choices(base)
        if not cls.card.lossless or len(options) != 1 or options[0].axes():
            continue
        trials = wins = 0
        for other in [(), *((t,) for c in known if c is not cls for t in c.choices(base)[:2])]:
            try:
                results = []
                for chosen in (other, (*other, options[0])):
                    e, made = candidate(base, chosen, 1 if q.training and q.free_micro_batch else None)
                    check(e)
                    results.append(quick(e, made, always=True).metrics)
            except Incompatible:
                continue
            trials += 1
            key = "step_time_s" if q.training else "e2e_s"
            off, on = results
            wins += key in on and on[key] <= off[key] and on["peak_bytes"] <= off["peak_bytes"]
        if trials and wins == trials:
            settled[cls.card.name] = f"never slower nor larger in {trials} trials"
    return settled
