"""Alpa's search (arXiv:2201.12023): operators by an integer program, stages by a dynamic program.

The planner's presets give the meshes, micro-batches, schedules and placements that are worth looking at. In the most
promising of them the layers are cut into stages by :func:`~ridgeline.search.auto.inter.best_cut`, and every part of a
stage gets its strategy by :func:`~ridgeline.search.auto.intra.best_strategies`. What is found is predicted as a whole;
where it does not fit after all, it is solved again with less room.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ridgeline.graph import Graph, training_graph
from ridgeline.graph.graph import even
from ridgeline.predict.common import rank_cluster, rewritten
from ridgeline.search.auto.costs import CostTable, Part, cost_table
from ridgeline.search.auto.inter import best_cut
from ridgeline.search.auto.intra import Node, best_strategies
from ridgeline.search.auto.points import Point, Simulator, point_of, sharder, splitter, without_parts
from ridgeline.search.found import Tried
from ridgeline.search.space import refusal
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sharding import DIVIDED, STRATEGIES, Sharding, Strategy

CLUSTERS = 8
"""Groups of consecutive layers of a stage whose layers share their strategies (Alpa's operator clustering)."""
REACH = 4
"""How far a stage's number of layers may be from the mean."""
PRESETS = 48
"""Presets that are refined, the fastest first."""
ROOM = (1.0, 0.93, 0.86)
"""Shares of the memory that are tried one after the other, as the program's bytes are estimates."""

Stage = tuple[Strategy, list[tuple[Strategy, Strategy]], Strategy]
"""Strategies of embedding, layers and head (the ends count where the stage has them)."""


@dataclass
class Refiner:
    """The two programs on one preset."""

    point: Point
    """The preset as a point."""
    experiment: Experiment
    tables: list[CostTable]
    """By pipeline stage; the same one for stages on equal devices."""
    room: float = 1.0
    _known: dict[tuple[object, ...], tuple[float, list[Strategy]]] = field(default_factory=dict)

    def solve(self) -> Point | None:
        """The best cut and strategies; None if nothing fits."""
        e = self.experiment
        split = splitter(self.point.preset)
        total = e.model.num_layers
        counts: list[int] | None = [total]
        chunks = getattr(split, "chunks", 1) if split else 1
        stages = math.prod(split.axes().values()) * chunks if split else 1
        if chunks > 1:
            counts = even(total, stages)
        elif stages > 1:
            unequal = total // stages if e.cluster.parts else REACH
            reach = None if total <= 2 * CLUSTERS else max(REACH, unequal)
            counts = best_cut(stages, total, e.accumulation, lambda *at: self.stage(stages, *at)[0], reach)
        if counts is None:
            return None
        picked: list[Stage] = []
        start = 0
        for k, n in enumerate(counts):
            seconds, strategies = self.stage(stages, k, start, start + n, chunks)
            if math.isinf(seconds):
                return None
            picked.append(self._spread(strategies, n, k == 0, k == stages - 1))
            start += n
        layers = [pair for stage in picked for pair in stage[1]]
        plan = Sharding(
            picked[0][0], tuple(a for a, _ in layers), tuple(m for _, m in layers), picked[-1][2]
        )  # fmt: skip
        uneven = tuple(counts) if split and counts != even(total, stages) else None
        return replace(self.point, sharding=plan if sharder(self.point.preset) else None, layers=uneven)

    def stage(self, stages: int, k: int, start: int, stop: int, chunks: int = 1) -> tuple[float, list[Strategy]]:
        """Seconds of a micro-batch in virtual stage ``k``, and the strategies of its nodes."""
        m = self.experiment.model
        moe = sum(m.is_moe_layer(i) for i in range(start, stop))
        rank = k % (stages // chunks)
        table = self.tables[rank]
        held = table.in_flight(rank)
        key = (stop - start, moe, k == 0, k == stages - 1, held, id(table))
        if key not in self._known:
            nodes = self._nodes(table, start, stop, k == 0, k == stages - 1, held)
            found = best_strategies(nodes, table.cut, table.join, self.room * table.room / chunks)
            self._known[key] = (math.inf, []) if found is None else (found.seconds, [*found.strategies])
        return self._known[key]

    def _nodes(self, t: CostTable, start: int, stop: int, first: bool, last: bool, held: float) -> list[Node]:
        m, tied = self.experiment.model, self.experiment.model.tie_embeddings
        nodes = [_node(t, [("embed", False)], held, tied)] if first else []
        at = start
        for n in _groups(stop - start):
            kinds = [m.is_moe_layer(i) for i in range(at, at + n)]
            nodes.append(_node(t, [("attention", kind) for kind in kinds], held))
            nodes.append(replace(_node(t, [("mlp", kind) for kind in kinds], held), joined=True))
            at += n
        return nodes + ([_node(t, [("head", False)], held, tied)] if last else [])

    def _spread(self, strategies: list[Strategy], layers: int, first: bool, last: bool) -> Stage:
        """The strategies of single layers from those of groups."""
        ends = strategies[0], strategies[-1]
        inner = strategies[1 if first else 0 : len(strategies) - (1 if last else 0)]
        pairs = [(inner[2 * i], inner[2 * i + 1]) for i, n in enumerate(_groups(layers)) for _ in range(n)]
        return ends[0], pairs, ends[1]


def _node(t: CostTable, parts: list[Part], held: float, tied: bool = False) -> Node:
    allowed = [s for s in t.parts[parts[0]] if not tied or s in DIVIDED]
    return Node(tuple(
        (s, sum(t.seconds(p, s) for p in parts), sum(t.bytes_of(p, s, held) for p in parts)) for s in allowed
    ))  # fmt: skip


def _groups(layers: int) -> list[int]:
    return even(layers, min(layers, CLUSTERS))


def refiner(point: Point, base: Experiment) -> Refiner | None:
    """The two programs on a preset; None where neither operators nor stages have a choice."""
    plain = replace(point, sharding=None, layers=None)
    e, techniques = plain.experiment(base)
    shard, split = sharder(plain.preset), splitter(plain.preset)
    if refusal((e, techniques), whole=True) or not (shard or split):
        return None

    def graph_of(strategy: Strategy) -> Graph:
        uniform = Sharding.uniform(strategy, e.model.num_layers) if shard else None
        of, made = replace(plain, sharding=uniform).experiment(base)
        return rewritten(training_graph(of), of, made)

    allowed: list[Strategy] = ["reduce"]
    for s in STRATEGIES[1:] if shard else ():
        uniform = Sharding.uniform(s, e.model.num_layers)
        if e.model.tie_embeddings and s == "whole":
            uniform = replace(uniform, embed="reduce", head="reduce")
        if not refusal(replace(plain, sharding=uniform).experiment(base)):
            allowed.append(s)
    places = rank_cluster(e).places(e.parallel.get("pp", 1))
    tables = {id(part): cost_table(e, graph_of, allowed, part) for part in places}
    return Refiner(plain, e, [tables[id(part)] for part in places])


def refine(presets: list[Tried], simulator: Simulator, step: Callable[[int, int], None]) -> None:
    """Refine the fastest presets; the simulator keeps the best plan."""
    points: dict[Point, None] = {}
    for t in sorted(presets, key=lambda t: t.rank):
        point = point_of(t.experiment)
        points.setdefault(point, None)
        points.setdefault(replace(point, preset=without_parts(point.preset)), None)
        if len(points) >= PRESETS:
            break
    for at, point in enumerate(points):
        simulator.seconds(point)
        _solve(point, simulator)
        step(at + 1, len(points))


def _solve(point: Point, simulator: Simulator) -> None:
    made = refiner(point, simulator.base)
    if made is None:
        return
    for share in ROOM:
        found = replace(made, room=share, _known={}).solve()
        if found is None:
            return
        simulator.seconds(found)
        if simulator.fits(found):
            return
