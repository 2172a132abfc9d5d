"""Searches by trial: Markov chain Monte Carlo as in FlexFlow (arXiv:1807.05358, section 6), and as baselines greedy
descent and random sampling. All judge a plan by the same simulator: the predictor.

FlexFlow's space has four dimensions, SOAP: samples, operators, attributes and parameters. Here a plan divides samples
(data parallelism, micro-batches, strategy batch), operators (pipeline stages), attributes (positions of the sequence)
and parameters (strategies reduce and scatter, ZeRO, experts). A proposal that leaves the operators as they are is
predicted from the graph that is known, whose operators remember their seconds: what FlexFlow's delta simulation is for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ridgeline.search.auto.points import Point, Simulator, sharder, splitter
from ridgeline.search.space import Set, Slots, micro_batches, slots
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sharding import IN_PARTS, STRATEGIES, Sharding, Strategy
from ridgeline.techniques.registry import techniques_of

TEMPERATURE = 0.05
"""A plan that is this share slower is accepted with probability 1/e."""
CHAINS = 8
"""Chains that share the budget, each from another random plan."""
RESTART = 100
"""Proposals without a better plan after which a chain starts anew from the best."""

_PAIRS = [(a, m) for a in STRATEGIES for m in STRATEGIES if (a in IN_PARTS) == (m in IN_PARTS)]


@dataclass(frozen=True)
class SearchSpace:
    """All points: presets from the planner's slots, and their refinements."""

    simulator: Simulator
    settled: Set
    required: frozenset[str]

    @cached_property
    def base(self) -> Experiment:
        """The experiment without techniques."""
        return self.simulator.base

    @cached_property
    def slots(self) -> Slots:
        """The planner's choices."""
        q = self.simulator.question
        return slots(q, self.base, q.techniques(), self.settled, self.required)

    @cached_property
    def groups(self) -> tuple[Sequence[Set], Sequence[Set], Sequence[Set], Sequence[Set], Sequence[int | None]]:
        """Meshes, shapes, cuts into stages, placements, and micro-batch sizes."""
        s = self.slots
        mesh, shape, split = ([*s.combinations(g)] for g in ("mesh", "shape", "split"))
        micros = micro_batches(self.base, 1, self.simulator.question.free_micro_batch)
        return mesh, shape, split, [*s.placements], micros

    def preset(self, chosen: tuple[int, ...]) -> Point:
        """The preset of one index into each of ``groups``."""
        mesh, shape, split, placements, micros = self.groups
        parts = mesh[chosen[0]] + shape[chosen[1]] + split[chosen[2]] + placements[chosen[3]] + self.settled
        fixed = tuple(t for t in self._fixed if type(t) not in map(type, parts))
        return Point((*fixed, *parts), micros[chosen[4]])

    @cached_property
    def _fixed(self) -> Set:
        return tuple(techniques_of(self.simulator.question.fixed))


@dataclass(frozen=True)
class State:
    """A point with the indices of its preset."""

    chosen: tuple[int, ...]
    point: Point


def neighbors(point: Point, e: Experiment) -> Iterator[Point]:
    """Points that differ in the strategies of one stage's layers (or of an end), or by one layer between two
    stages."""
    cut = point.cut(e)
    if sharder(point.preset):
        plan = point.sharding or Sharding.uniform("reduce", e.model.num_layers)
        for strategy in STRATEGIES:
            yield replace(point, sharding=replace(plan, embed=strategy))
            yield replace(point, sharding=replace(plan, head=strategy))
            yield replace(point, sharding=replace(plan, embed=strategy, head=strategy))
            yield replace(point, sharding=Sharding.uniform(strategy, e.model.num_layers))
        spans, start = [(0, e.model.num_layers)], 0
        for n in cut if len(cut) > 1 else ():
            spans.append((start, start + n))
            start += n
        for first, stop in spans:
            for pair in _PAIRS:
                yield replace(point, sharding=_with(plan, first, stop, pair))
    if splitter(point.preset):
        for a in range(len(cut)):
            for b in range(len(cut)):
                if a != b and cut[a] > 1 and (abs(a - b) == 1 or {a, b} & {0, len(cut) - 1}):
                    moved = [n + (i == b) - (i == a) for i, n in enumerate(cut)]
                    yield replace(point, layers=tuple(moved))


def _with(plan: Sharding, first: int, stop: int, pair: tuple[Strategy, Strategy]) -> Sharding:
    attention, mlp = [*plan.attention], [*plan.mlp]
    attention[first:stop] = [pair[0]] * (stop - first)
    mlp[first:stop] = [pair[1]] * (stop - first)
    return replace(plan, attention=tuple(attention), mlp=tuple(mlp))


def descend(point: Point, simulator: Simulator, budget: int) -> Point:
    """The first better neighbor, again and again, for at most ``budget`` predictions."""
    seconds, spent = simulator.seconds(point), simulator.calls
    better = True
    while better and simulator.calls - spent < budget:
        better = False
        for other in neighbors(point, simulator.base):
            if (found := simulator.seconds(other)) < seconds:
                point, seconds, better = other, found, True
                break
            if simulator.calls - spent >= budget:
                break
    return point


def _draw(space: SearchSpace, rng: random.Random) -> State:
    chosen = tuple(rng.randrange(len(g)) for g in space.groups)
    point = space.preset(chosen)
    if sharder(point.preset) and rng.random() < 0.5:
        layers = space.base.model.num_layers
        pairs = [rng.choice(_PAIRS) for _ in range(layers)]
        inner = tuple(a for a, _ in pairs), tuple(m for _, m in pairs)
        point = replace(point, sharding=Sharding(rng.choice(STRATEGIES), *inner, rng.choice(STRATEGIES)))
    return State(chosen, point)


def _proposal(state: State, space: SearchSpace, rng: random.Random) -> State:
    """Another value of one dimension: of the preset, of one layer's or range's strategies, or of the cut."""
    if rng.random() < 0.5:
        around = [*neighbors(state.point, space.base)]
        if around:
            return State(state.chosen, rng.choice(around))
    at = rng.randrange(len(state.chosen))
    chosen = tuple(rng.randrange(len(g)) if i == at else c
                   for i, (c, g) in enumerate(zip(state.chosen, space.groups, strict=True)))  # fmt: skip
    point = space.preset(chosen)
    if sharder(point.preset) and state.point.sharding is not None:
        point = replace(point, sharding=state.point.sharding)
    return State(chosen, point)


def _start(space: SearchSpace, rng: random.Random, tries: int = 2000) -> State:
    """Any plan that ``check`` accepts."""
    for _ in range(tries):
        state = _draw(space, rng)
        if math.isfinite(space.simulator.seconds(state.point)):
            return state
    return _draw(space, rng)


def flexflow(space: SearchSpace, budget: int, seed: int = 0) -> None:
    """Metropolis-Hastings from several random plans: a slower one is accepted with probability exp(-relative slowdown /
    TEMPERATURE)."""
    rng = random.Random(seed)
    for chain in range(CHAINS):
        _chain(space, budget * (chain + 1) // CHAINS, rng)


def _chain(space: SearchSpace, until: int, rng: random.Random) -> None:
    """One chain, until ``until`` plans have been predicted over all chains, or proposals repeat."""
    simulator = space.simulator
    state = best = _start(space, rng)
    seconds = least = simulator.seconds(state.point)
    since = tries = 0
    while simulator.calls < until and tries < 20 * until:
        tries += 1
        other = _proposal(state, space, rng)
        found = simulator.seconds(other.point)
        if math.isfinite(found) and (
            found <= seconds or rng.random() < math.exp((seconds - found) / (seconds * TEMPERATURE))
        ):
            state, seconds = other, found
        since += 1
        if seconds < least:
            best, least, since = state, seconds, 0
        elif since >= RESTART:
            state, seconds, since = best, least, 0


def greedy(space: SearchSpace, budget: int, seed: int = 0) -> None:
    """The first better proposal is taken; a chain that finds none starts anew elsewhere."""
    rng, simulator = random.Random(seed), space.simulator
    tries = 0
    while simulator.calls < budget and tries < 20 * budget:
        state = _start(space, rng)
        seconds, since = simulator.seconds(state.point), 0
        while since < RESTART and simulator.calls < budget and tries < 20 * budget:
            tries += 1
            other = _proposal(state, space, rng)
            found = simulator.seconds(other.point)
            since += 1
            if found < seconds:
                state, seconds, since = other, found, 0


def sample(space: SearchSpace, budget: int, seed: int = 0) -> None:
    """Independent random points."""
    rng, simulator = random.Random(seed), space.simulator
    tries = 0
    while simulator.calls < budget and tries < 20 * budget:
        tries += 1
        simulator.seconds(_draw(space, rng).point)


TRIALS: dict[str, Callable[[SearchSpace, int, int], None]] = {"flexflow": flexflow, "greedy": greedy, "random": sample}
"""Searches by trial, by name."""
