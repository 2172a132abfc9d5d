"""What is below one node of the search tree: every split and placement."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from functools import cached_property

from ridgeline.graph import Graph
from ridgeline.graph.schedule import idle_share
from ridgeline.predict.quick import Quick, computation, least_bytes, prepare, quick, split
from ridgeline.search.found import WORTH, Found, Tried, doubt
from ridgeline.search.least_memory import LeastMemory, held_parameters
from ridgeline.search.nodes import SearchNode
from ridgeline.search.question import Question
from ridgeline.search.space import (
    Set,
    Slots,
    beside,
    candidate,
    offloads,
    refusal,
    splits_batch,
    with_open_options,
    workload_refusal,
)
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Technique

SLACK = 1.1
"""Plans whose bound is this many times slower than the best found are not looked at: also the reach of the front."""


class Expansion:
    """One node: its computation, for every split with the bubbles of its schedule, bounds all placements. What is left
    is sized first, and timed only when it fits."""

    def __init__(
        self, q: Question, base: Experiment, space: Slots, node: SearchNode, found: Found, bounded: bool = False
    ) -> None:
        self.q, self.base, self.space, self.node, self.found = q, base, space, node, found
        self.rest = tuple(t for t in node.chosen if t.phase != "recompute")
        self.fixed = tuple(techniques_of(base.plan))
        self.most = max(part.device.memory_bytes for part in base.cluster.parts or (base.cluster,))
        self.everything = q.goal == "memory"
        """Whether no plan is left out for being slower than another."""
        # Where faster plans are better, the fastest bounds what misses the limit, too, and is told where none keeps it.
        self.longest = q.longest * q.weight(base.cluster) if bounded or q.goal in ("cost", "memory") else math.inf
        """Weighed seconds of a step above which it breaks a limit."""
        self.by_time = q.goal in ("throughput", "latency") and bool(q.slo.keys() & {"step_time_s", "tokens_per_s"})
        """Whether plans that break a limit on the very time by which plans are ranked bound others, too."""
        self.doubt = self._doubt((*self.fixed, *node.chosen))
        self.tight = False
        """Whether activations were too large in any prediction."""

    @cached_property
    def least_seconds(self) -> float:
        """Of a step, weighed; 0 where no bound of time counts."""
        if not self.everything:
            return self.node.bound
        point = candidate(self.base, self.node.chosen, self.node.micro)
        return computation(*point) if self.longest < math.inf else 0.0

    @cached_property
    def core(self) -> Graph | None:
        """The graph before splits and placements."""
        return prepare(*candidate(self.base, self.node.chosen, self.node.micro)) if self.q.training else None

    @property
    def parameters(self) -> Hashable:
        """What decides the memory of states, but for the mesh, the split and the placement: the same for all
        micro-batches, and whatever is recomputed."""
        key = self.node.base, self.rest
        if key not in self.found.parameters:
            self.found.parameters[key] = held_parameters(self.core) if self.core else None
        return self.found.parameters[key]

    def run(self) -> None:
        """Predict what may be an answer. Offloading is only tried where no other placement fits."""
        found, node = self.found, self.node
        if self.least_seconds > self.longest:
            found.count("missed", self.space.below)
            return
        possible, apart = beside(node.chosen, self.space.placements)
        fixed = splits_batch(self.fixed)
        for stages in self.space.combinations("split"):
            e, techniques, refused = self._split(stages)
            if refused:
                found.refuse(refused, len(self.space.placements))
                continue
            parallel = self.q.training and e.gradient_ranks > 1
            kept, more = beside(stages, possible)
            for reason, n in (apart + more).items():
                found.refuse(reason, n)
            placements = [p for p in kept if not self.q.training or (fixed or splits_batch(p)) == parallel]
            if len(placements) < len(kept):
                why = "placement: gradients are reduced exactly where there are several data-parallel ranks"
                found.refuse(why, len(kept) - len(placements))
            # Whether micro-batches accumulate decides which gradients are sharded.
            setting = node.base, node.mesh, self.parameters, stages, self.q.training and e.accumulation > 1
            left = self._without_known(placements, setting)
            prepared = split(self.core, e, techniques) if left and self.core else None
            room = self._room()
            if prepared and room < math.inf and least_bytes(prepared, e) > room:
                found.count(self._past(room), len(left))
                continue
            self._place(stages, left, LeastMemory(prepared, setting, found.states, self.fixed, self.tight))

    def _split(self, stages: Set) -> tuple[Experiment, list[Technique], str]:
        """The experiment with these stages, and why it is refused."""
        node, known = self.node, self.found.undivided
        degrees = node.base, node.mesh, node.micro, stages
        if degrees not in known:
            known[degrees] = workload_refusal(candidate(self.base, node.mesh + stages, node.micro)[0])
        if known[degrees]:
            return self.base, [], known[degrees]
        e, techniques = candidate(self.base, node.chosen + stages, node.micro)
        return e, techniques, refusal((e, techniques), whole=True)

    def _room(self) -> float:
        """Bytes per rank above which a plan is no answer: beyond the limit, or far behind the least that was found."""
        limit = self.q.slo.get("peak_bytes", math.inf)
        return min(limit, WORTH * self.found.smallest) if self.everything else limit

    def _past(self, room: float) -> str:
        """What plans count as that take more than ``room``."""
        if room >= self.most:
            return "oversize"
        return "missed" if room == self.q.slo.get("peak_bytes") else "bounded"

    def _only_too_slow(self, timed: Quick) -> bool:
        """Whether a plan breaks no other limits than those of time: what takes longer misses by more."""
        by_time = self.q.training and self.by_time
        return by_time and not self.q.misses(timed.metrics, but=("step_time_s", "tokens_per_s"))

    def _doubt(self, techniques: Iterable[Technique]) -> float:
        """By what factor ranks are worse than times at least. What misses a limit on time bounds by its time alone: a
        faster plan may keep it, however many techniques of it are not proven."""
        return 1.0 if self.by_time else doubt(self.base.task, techniques)

    def _without_known(self, placements: list[Set], setting: tuple[Hashable, ...]) -> list[Set]:
        """The placements but for those that other micro-batches and recomputation have ruled out."""
        found, room = self.found, min(self.most, self._room())
        left = []
        for placement in placements:
            if (known := found.states.get((*setting, placement))) and known.held + known.gradients > room:
                found.count(self._past(room), 1)
            else:
                left.append(placement)
        return left

    def _place(self, stages: Set, placements: list[Set], memory: LeastMemory) -> None:
        """The placements of one split into stages: those that offload come last."""
        q, node, found, prepared = self.q, self.node, self.found, memory.graph
        weight = q.weight(self.base.cluster)
        floor = self.least_seconds  # of any of them
        if prepared and (pipe := prepared.pipeline):
            floor *= 1 + idle_share(pipe.schedule, pipe.degree, prepared.accumulation, pipe.chunks)
        doubtful = self.doubt * self._doubt(stages)
        fits, least = False, 0  # more techniques than these offload only where nothing fits
        enough: list[frozenset[Technique]] = []  # placements that keep all limits: to offload more only takes longer
        for done, placement in enumerate(placements):
            if floor > self.longest or (floor * doubtful > SLACK * found.fastest and not self.everything):
                found.count("missed" if floor > self.longest else "bounded", len(placements) - done)
                return
            if fits and offloads(placement) > least and not self.everything:
                found.count("dominated", len(placements) - done)
                return
            if any(less < set(placement) for less in enough) and not self.everything:
                found.count("dominated", 1)
                continue
            seconds = self._least_with(memory, placement, floor, weight)
            rank = seconds * doubtful * self._doubt(placement)
            if seconds > self.longest or (rank > SLACK * found.fastest and not self.everything):
                found.count("missed" if seconds > self.longest else "bounded", 1)
                continue
            room = min(self.most, self._room())
            # As long as nothing fits, what misses by least is to be found: only what predictions showed is left out.
            if memory.exceeds(room, placement, compute=found.fastest < math.inf):
                found.count(self._past(room), 1)
                continue
            e, techniques = candidate(self.base, node.chosen + stages + placement, node.micro)
            refused = refusal((e, techniques))
            if not refused and offloads(placement) and not q.training:  # the predictor decides how much goes where
                e, techniques, refused = with_open_options(e, techniques)
            if refused:
                found.refuse(refused, 1)
                continue
            timed = quick(e, techniques, prepared=prepared, activations=memory.activations(placement), room=room)
            memory.learn(placement, timed)
            self._learn_after(memory, placement, timed)
            self.tight = memory.tight
            if timed.fits and q.training and timed.metrics["peak_bytes"] > room:
                found.count(self._past(room), 1)
                continue
            judged = judge(q, e, timed, found)
            if not judged and timed.fits and self._only_too_slow(timed):
                found.faster(timed.metrics["step_time_s"] * weight)
            if timed.fits and not offloads(placement) and "peak_bytes" not in q.slo:
                fits = True  # what misses another limit from the device's memory misses it by more from elsewhere
            if judged:
                away = offloads(placement)
                # Of plans that offload, only in serving those that offload less are faster.
                if not fits and (not away or q.workload.kind == "serve"):
                    fits, least = True, away
                found.smallest = min(found.smallest, timed.metrics["peak_bytes"])
                if q.training:
                    found.faster(judged.weighed(q))
                    enough += [frozenset(placement)] if away else []

    def _least_with(self, memory: LeastMemory, placement: Set, floor: float, weight: float) -> float:
        """Least weighed seconds of a step whose computation takes ``floor``: with what other micro-batches have shown
        to follow it, and gradients that are not hidden behind the last micro-batch."""
        known = self.found.after.get((*memory.setting, placement))
        if known is None or memory.graph is None or memory.graph.accumulation < known[0]:
            return floor
        _, after, reducing = known
        hidden = 2 * self.least_seconds / memory.graph.accumulation  # a stage may take up to twice the mean
        return floor + after * weight + max(0.0, reducing * weight - hidden)

    def _learn_after(self, memory: LeastMemory, placement: Set, timed: Quick) -> None:
        key = *memory.setting, placement
        times = memory.graph.accumulation if memory.graph else 0
        if timed.after and times <= self.found.after.get(key, (times, 0.0, 0.0))[0]:
            self.found.after[key] = times, timed.after, timed.reducing


def judge(q: Question, e: Experiment, timed: Quick, found: Found) -> Tried | None:
    """Take in a prediction → the plan, if it fits and keeps the limits."""
    if not timed.fits:
        found.count("oversize", 1)
        found.infeasible(Tried(e, timed, math.inf))
        return None
    missed = q.misses(timed.metrics)
    require_metric(q, e, timed)
    t = ranked(q, e, timed, missed)
    if missed:
        found.count("missed", 1)
        found.infeasible(t)
    else:
        found.count("feasible", 1)
        found.feasible(t)
    return None if missed else t


def require_metric(q: Question, e: Experiment, timed: Quick) -> None:
    """Raise :class:`UserError` where what the goal ranks by is not predicted."""
    if q.metric not in timed.metrics:
        raise UserError(f"goal {q.goal!r} needs {q.metric}, which is not predicted for {e.cluster.device.name}",
                        "give the device a price_per_hour, or choose another goal")  # fmt: skip


def ranked(q: Question, e: Experiment, timed: Quick, missed: list[str] | None = None) -> Tried:
    """The plan with its rank: each technique that is not proven must win by more than whole steps are usually off."""
    t = Tried(e, timed, q.rank(timed.metrics), missed or [], q.excess(timed.metrics))
    if q.goal != "memory":
        t.rank *= t.doubt if t.rank > 0 else 1 / t.doubt
    return t
