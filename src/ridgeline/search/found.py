"""What a search keeps of the plans that it predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from ridgeline.predict.interval import STEP
from ridgeline.predict.quick import Quick, quick
from ridgeline.search.kinds import kind_of
from ridgeline.search.least_memory import States
from ridgeline.search.question import HIGHER, Question
from ridgeline.search.workers import fastest_of_all
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Technique

KEPT = 5
"""Answers, and nearest misses."""

ALIKE = 0.03
"""A gain of less, in the goal, in latency or of the device's memory, is none."""

WORTH = 1.4
"""Other kinds that miss the goal by more are no alternatives."""


@dataclass(slots=True)
class Tried:
    """One plan that was predicted."""

    experiment: Experiment
    quick: Quick
    rank: float
    """The goal as a number of which less is better."""
    missed: list[str] = field(default_factory=list)
    """Limits it breaks."""
    excess: float = 0.0
    """By what factor it breaks the worst of them."""
    _doubt: float = field(init=False, default=0.0)
    """:attr:`doubt`, once it was asked for."""
    calls: tuple[str, ...] = field(init=False)
    """Its plan, as text."""
    names: frozenset[str] = field(init=False)
    """Techniques that are on."""

    def __post_init__(self) -> None:
        self.calls = tuple(self.experiment.plan.strings())
        self.names = frozenset(c.name for c in self.experiment.plan.calls)

    @property
    def metrics(self) -> dict[str, float]:
        """Its predicted metrics."""
        return self.quick.metrics

    @property
    def over(self) -> float:
        """Peak memory over what the device has."""
        return self.metrics["peak_bytes"] / self.quick.limit

    def weighed(self, q: Question) -> float:
        """Seconds of a training step, times the goal's weight and the factor for techniques that are not proven."""
        return self.metrics["step_time_s"] * q.weight(self.experiment.cluster) * self.doubt

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same plan, batch and cluster."""
        e = self.experiment
        return e.cluster.label, e.batch_size, e.micro_batch_size, self.calls

    def is_level_with(self, other: Tried) -> bool:
        """Whether the goal tells no difference, but for doubt: of engines that keep up with a load, when its last
        answer ended is chance (:meth:`Question.rank`)."""
        serving = self.experiment.task == "serve"
        return serving and math.isclose(self._without_doubt, other._without_doubt)

    @property
    def _without_doubt(self) -> float:
        return self.rank / self.doubt if self.rank > 0 else self.rank * self.doubt

    def offers_beside(self, other: Tried, q: Question) -> bool:
        """Whether a user might choose it over the other: for what it gains in the goal, in memory (in serving, where
        the cache takes what is left: in latency), or because it divides and moves less, has fewer devices, or proven
        techniques."""
        fewer = len(self.kind) < len(other.kind) or len(self.unvalidated) < len(other.unvalidated)
        if fewer or self.experiment.cluster.size < other.experiment.cluster.size:
            return True
        if self.experiment.task != "serve" and (other.over - self.over) >= ALIKE:
            return True
        latencies = ("ttft_s", "tpot_s") if self.experiment.task == "serve" else ()
        return any(
            (self.metrics[m] / other.metrics[m] - 1) * (1 if m in HIGHER else -1) >= ALIKE
            for m in (*([] if self.is_level_with(other) else [q.metric]), *latencies)
            if other.metrics.get(m)
        )

    @property
    def kind(self) -> tuple[str, ...]:
        """Its kind, in words."""
        return kind_of(self.experiment)

    @property
    def unvalidated(self) -> list[str]:
        """Techniques, or options of one, without whose kind any prediction was compared with published measurements."""
        e = self.experiment
        return sorted(what for t in techniques_of(e.plan) if (what := t.unproven(e.task)))

    @property
    def doubt(self) -> float:
        """By what factor its rank is worse than its time."""
        if not self._doubt:
            self._doubt = doubt(self.experiment.task, techniques_of(self.experiment.plan))
        return self._doubt


def doubt(task: str, techniques: Iterable[Technique]) -> float:
    """By how much a plan must win: by more than whole steps are usually off, for each technique that is not proven."""
    return float((1 + STEP[task]) ** sum(bool(t.unproven(task)) for t in techniques))


@dataclass(slots=True)
class Found:
    """The plans that a part of the search found."""

    kinds: dict[tuple[str, ...], Tried] = field(default_factory=dict)
    """The best feasible plan of each kind (:func:`kind_of`)."""
    front: list[Tried] = field(default_factory=list)
    """Not beaten in both the goal and memory, among plans at most ``SLACK`` times slower than the best."""
    fitting: dict[Hashable, Tried] = field(default_factory=dict)
    """Every plan that fits and keeps the limits, as far as it was predicted."""
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

    states: dict[Hashable, States] = field(default_factory=dict)
    """What a rank holds by mesh, parameters, split and placement."""
    after: dict[Hashable, tuple[int, float, float]] = field(default_factory=dict)
    """By the same, of the plan with the fewest micro-batches that was timed: their number, the seconds that follow its
    computation, and those of reductions (:attr:`Quick.after`, :attr:`Quick.reducing`)."""
    parameters: dict[Hashable, Hashable] = field(default_factory=dict)
    """What of a mesh and shape decides the memory of states."""
    undivided: dict[Hashable, str] = field(default_factory=dict)
    """Why the workload does not divide over a mesh and split in micro-batches; empty: it does."""

    fastest: float = math.inf
    """Seconds of the fastest plan that fits, as :meth:`Tried.weighed` has them."""

    smallest: float = math.inf
    """Peak bytes of the smallest plan that fits."""

    def count(self, what: str, n: int) -> None:
        """Account for ``n`` candidates."""
        self.counts["considered"] += n
        self.counts[what] += n

    def faster(self, seconds: float) -> None:
        """Record a plan's (weighed) seconds, and what other processes found."""
        self.fastest = fastest_of_all(min(self.fastest, seconds))

    def refuse(self, reason: str, n: int) -> None:
        """Account for ``n`` candidates that ``check`` refuses."""
        self.count("refused", n)
        self.refusals[reason] += n

    def feasible(self, t: Tried) -> None:
        """Record a plan that fits and keeps the limits."""
        self.fitting[t.key] = t
        if t.kind not in self.kinds or order(t) < order(self.kinds[t.kind]):
            self.kinds[t.kind] = t
        if self.simplest is None or (len(t.names), *order(t)) < (len(self.simplest.names), *order(self.simplest)):
            self.simplest = t
        for name in t.names:
            if name not in self.with_technique or order(t) < order(self.with_technique[name]):
                self.with_technique[name] = t
        peak = t.metrics["peak_bytes"]
        if not any(o.rank <= t.rank and o.metrics["peak_bytes"] <= peak for o in self.front):
            self.front = [o for o in self.front if o.rank < t.rank or o.metrics["peak_bytes"] < peak] + [t]

    def infeasible(self, t: Tried) -> None:
        """Record a plan that does not fit or misses a limit; the nearest are kept, and their peaks are whole."""
        if self._is_far(t):
            return
        if not t.quick.complete:
            t = replace(t, quick=quick(t.experiment, techniques_of(t.experiment.plan), always=True))
            if self._is_far(t):
                return
        if all(o.key != t.key for o in self.nearest):
            self.nearest = sorted([*self.nearest, t], key=miss)[:KEPT]

    def _is_far(self, t: Tried) -> bool:
        return len(self.nearest) == KEPT and miss(self.nearest[-1]) <= miss(t)

    def merge(self, other: Found) -> None:
        """Merge what another part found."""
        feasible = [*other.kinds.values(), *other.front, *other.with_technique.values(), *other.fitting.values()]
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
    without_effect: frozenset[str]
    """Techniques that changed nothing in any trial, and so were not considered."""
    seconds: float

    @property
    def best(self) -> list[Tried]:
        """The best feasible plan, then the best of up to four other kinds, as far as each comes near the best and has
        something to offer beside those before it."""
        ranked = sorted(self.found.kinds.values(), key=order)
        answers = ranked[:1]
        for t in ranked[1:]:
            near = max(t.rank / answers[0].rank, answers[0].rank / t.rank) <= WORTH
            if near and len(answers) < KEPT and all(t.offers_beside(o, self.question) for o in answers):
                answers.append(t)
        return answers


def miss(t: Tried) -> tuple[bool, float, int]:
    """By how much an infeasible plan misses: what does not fit misses by more than any limit."""
    fits = t.quick.fits  # host memory may be what is missing
    return not fits, t.excess if fits else max(t.over, 1.0), len(t.names)


def order(t: Tried) -> tuple[float, float, float, int, tuple[str, ...]]:
    """Equal ranks: in serving all that keep up with the arrivals, of which the one with the least latency is best."""
    latency = t.metrics["e2e_s"] if t.experiment.task == "serve" else 0.0
    return t.rank, latency, t.metrics["peak_bytes"], len(t.names), t.calls
