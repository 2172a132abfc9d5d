"""Points of the space that automatic parallelization searches: a preset plan, the strategy of every part of the model,
and the number of layers of every stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ridgeline.graph import Graph
from ridgeline.graph.graph import even
from ridgeline.predict.quick import Quick, prepare, quick, split
from ridgeline.search.question import Question
from ridgeline.search.space import Set, candidate, refusal, splits_batch
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.sharding import Sharding
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Technique

SEARCHED = frozenset({"split", "tensor", "recompute", "compile", "shard"})
"""Phases of the techniques that presets combine: what divides the model, its batch and its states, and what one layer
computes and keeps. Offloading is left to the planner."""


def narrowed(q: Question) -> Question:
    """The question with only the techniques that automatic parallelization combines. Raises :class:`UserError` for a
    task or a goal that it does not know."""
    if q.workload.kind != "pretrain":
        raise UserError(f"automatic parallelization is for task pretrain, not {q.workload.kind!r}",
                        "leave out --method for the planner's own search")  # fmt: skip
    if q.goal not in ("throughput", "latency") or q.slo:
        raise UserError("automatic parallelization finds the fastest step: goals throughput and latency, no --slo",
                        "leave out --method for the planner's own search")  # fmt: skip
    names = frozenset(cls.card.name for cls in q.techniques() if cls.phase in SEARCHED)
    return replace(q, only=names, forbid=frozenset(), allow=frozenset())


def sharder(techniques: Set | list[Technique]) -> Technique | None:
    """The technique that divides layers, if each of their operators may have a strategy of its own."""
    if any("sequence_parts" in t.parts or "divided_experts" in t.parts for t in techniques):
        return None
    return next((t for t in techniques if "sharding" in type(t).model_fields), None)


def splitter(techniques: Set | list[Technique]) -> Technique | None:
    """The technique that cuts the model into stages."""
    return next((t for t in techniques if t.phase == "split" and "layers" in type(t).model_fields), None)


_CORES = 256
"""Graphs that a simulator keeps."""


@dataclass(frozen=True)
class Point:
    """A plan as a preset with two refinements."""

    preset: Set
    """Techniques, without ``sharding`` and ``layers``."""
    micro: int | None
    sharding: Sharding | None = None
    layers: tuple[int, ...] | None = None

    def techniques(self) -> Set:
        """The techniques with the refinements as options."""
        out = []
        for t in self.preset:
            if self.sharding is not None and t is sharder(self.preset):
                t = t.model_copy(update={"sharding": self.sharding.entries() or None})
            elif self.layers is not None and t is splitter(self.preset):
                t = t.model_copy(update={"layers": self.layers})
            out.append(t)
        return tuple(out)

    def experiment(self, base: Experiment) -> tuple[Experiment, list[Technique]]:
        """Its experiment and techniques, not checked."""
        return candidate(base, self.techniques(), self.micro)

    def cut(self, e: Experiment) -> tuple[int, ...]:
        """Layers of every stage."""
        split = splitter(self.preset)
        if split is None:
            return (e.model.num_layers,)
        if self.layers is not None:
            return self.layers
        return tuple(even(e.model.num_layers, math.prod(split.axes().values()) * getattr(split, "chunks", 1)))


@dataclass
class Simulator:
    """The predictor as the objective of a search: seconds of a step, remembered for every plan."""

    question: Question
    calls: int = 0
    """Plans that were predicted."""
    best: tuple[Point, Quick] | None = None
    watch: Callable[[int], None] = lambda calls: None
    """Called with ``calls`` after every prediction."""
    _known: dict[tuple[object, ...], tuple[float, bool]] = field(default_factory=dict)
    _cores: dict[tuple[object, ...], Graph] = field(default_factory=dict)

    @property
    def base(self) -> Experiment:
        """The question's experiment without techniques."""
        return self.question.base(self.question.cluster).model_copy(update={"plan": Plan()})

    def seconds(self, point: Point) -> float:
        """Predicted seconds of a step; infinite for a plan that ``check`` refuses. One that does not fit is charged
        ten times its share above the device's memory, so that a search finds its way back."""
        return self._look(point)[0]

    def fits(self, point: Point) -> bool:
        """Whether a plan is accepted by ``check`` and fits."""
        return self._look(point)[1]

    def _look(self, point: Point) -> tuple[float, bool]:
        e, techniques = point.experiment(self.base)
        key = (tuple(e.plan.strings()), point.micro)
        if key not in self._known:
            self._known[key] = self._predicted(point, e, techniques)
        return self._known[key]

    def _predicted(self, point: Point, e: Experiment, techniques: list[Technique]) -> tuple[float, bool]:
        divides = e.world % math.prod(e.parallel.values()) == 0
        # Gradients are reduced exactly where there are several data-parallel ranks.
        if (
            not divides
            or splits_batch(tuple(techniques)) != (e.gradient_ranks > 1)
            or refusal((e, techniques), whole=True)
        ):
            return math.inf, False
        found = quick(e, techniques, always=True, prepared=self._prepared(point, e, techniques))
        self.calls += 1
        self.watch(self.calls)
        seconds = found.metrics["step_time_s"]
        if not found.fits:
            return seconds * (1 + 10 * max(0.1, found.metrics["peak_bytes"] / found.limit - 1)), False
        if self.best is None or seconds < self.best[1].metrics["step_time_s"]:
            self.best = point, found
        return seconds, True

    def _prepared(self, point: Point, e: Experiment, techniques: list[Technique]) -> Graph:
        """The graph before states are placed. What plans with the same operators share is built and timed once."""
        operators = tuple(t for t in point.techniques() if t.phase not in ("split", "shard"))
        key = (operators, point.micro)
        if key not in self._cores:
            if len(self._cores) >= _CORES:
                self._cores.clear()
            self._cores[key] = prepare(*candidate(self.base, operators, point.micro))
        return split(self._cores[key], e, techniques)


def point_of(e: Experiment) -> Point:
    """A plan as a point."""
    techniques = techniques_of(e.plan)
    shard, split = sharder(techniques), splitter(techniques)
    made: list[Technique] = []
    sharding = None
    layers = None
    for t in techniques:
        if t is shard and getattr(t, "sharding", None) is not None:
            sharding = Sharding.parse(t.sharding, e.model.num_layers)  # type: ignore[attr-defined]
            t = t.model_copy(update={"sharding": None})
        elif t is split and getattr(t, "layers", None) is not None:
            layers = t.layers  # type: ignore[attr-defined]
            t = t.model_copy(update={"layers": None})
        made.append(t)
    return Point(tuple(made), e.training.micro_batch_size, sharding, layers)


def without_parts(preset: Set) -> Set:
    """A preset without what keeps the residual stream in parts along the sequence."""
    return tuple(t for t in preset if "sequence_parts" not in t.card.changes)
