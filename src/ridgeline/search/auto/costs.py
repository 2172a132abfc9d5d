"""What each part of a model costs under each of its strategies: seconds and bytes, from the predictor's own operators.

A *part* is the embedding, a layer's attention or MLP (each with its norm and its residual addition), or the head with
the loss. The cost of a part does not depend on the strategies of the others, but for the form of the residual stream
between them, so four graphs, each with one strategy everywhere, hold the costs of all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.graph import Graph
from ridgeline.graph.graph import Block, Op
from ridgeline.graph.schedule import in_flight
from ridgeline.predict.step.block_times import in_direction, seconds_of
from ridgeline.predict.step.in_step import InStepFactors, training_factors
from ridgeline.predict.step.peak_memory import training_peak
from ridgeline.predict.step.training_step import update_ops
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sharding import Strategy

Part = tuple[str, bool]
"""embed, attention, mlp or head; and whether it is of a layer with experts."""


class PartCost(NamedTuple):
    """The cost of one part on one rank."""

    seconds: float
    """Forward and backward of one micro-batch."""
    once: float
    """Seconds once per step: reducing its gradients, updating its parameters."""
    held: float
    """Bytes of its parameters, gradients and optimizer states."""
    saved: float
    """Bytes of its activations of one micro-batch."""


@dataclass(frozen=True)
class CostTable:
    """The costs of all parts under every strategy."""

    parts: dict[Part, dict[Strategy, PartCost]]
    cut: float
    """Seconds of a micro-batch where the residual stream goes from whole to parts (the gather of its gradient)."""
    join: float
    """The same from parts to whole."""
    micros: int
    """Micro-batches of a step."""
    room: float
    """Bytes for ``held`` and ``saved``: the device's memory without what does not depend on the strategies."""
    schedule: str
    stages: int

    def seconds(self, part: Part, strategy: Strategy) -> float:
        """Seconds of one micro-batch, with an equal share of what happens once per step."""
        c = self.parts[part][strategy]
        return c.seconds + c.once / self.micros

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at a time."""
        return in_flight(self.schedule, stage, self.stages, self.micros) if self.stages > 1 else 1.0

    def bytes_of(self, part: Part, strategy: Strategy, held: float) -> float:
        """Bytes of a part with the activations of ``held`` micro-batches."""
        c = self.parts[part][strategy]
        return c.held + held * c.saved


def cost_table(
    e: Experiment, graph_of: Callable[[Strategy], Graph], strategies: Iterable[Strategy], cluster: Cluster
) -> CostTable:
    """The table of a cluster's devices from a closed graph for each strategy, with it everywhere."""
    parts: dict[Part, dict[Strategy, PartCost]] = {}
    room = cluster.device.memory_bytes
    stream = 0.0
    for strategy in strategies:
        g = graph_of(strategy)
        update = update_ops(g, e)
        factors = training_factors(cluster, g.fused)
        rates = _Rates(g, update, cluster, factors)
        for b in g.blocks:
            count = sum(o.repeat for o in g.blocks if _same_layers(o, b))
            for name, part in _parts_of(b):
                cost = rates.of(b, name)
                known = parts.setdefault(part, {}).get(strategy, PartCost(0.0, 0.0, 0.0, 0.0))
                share = b.repeat / count
                added = (x + share * y for x, y in zip(known, cost, strict=True))
                parts[part][strategy] = PartCost(*added)
        peak = training_peak(g)
        beside = sum(v for k, v in peak.categories.items() if k in ("temporaries", "buffers"))
        room = min(room, cluster.device.memory_bytes - cluster.device.reserved_bytes - beside)
        t = e.parallel.get("tp", 1)
        size = g.residual * (t if strategy in ("scatter", "batch") else 1)
        gather = Op("stream.gather", "communication", "all_gather", bytes=size, link_bytes=size, ranks=t, axis="tp")
        stream = seconds_of(gather, cluster) if t > 1 else 0.0
    pipe = g.pipeline
    schedule, stages = (pipe.schedule, pipe.degree) if pipe else ("", 1)
    return CostTable(parts, stream, stream, e.accumulation, room, schedule, stages)


def _same_layers(a: Block, b: Block) -> bool:
    return a.name == b.name and _has_experts(a) == _has_experts(b)


def _has_experts(b: Block) -> bool:
    return any(".experts." in p.name for p in b.params)


def _parts_of(b: Block) -> list[tuple[str, Part]]:
    if not b.is_layer:
        name = "head" if b.is_head else "embed"
        return [(name, (name, False))]
    return [(name, (name, _has_experts(b))) for name in ("attention", "mlp")]


@dataclass
class _Rates:
    """Seconds and bytes of a graph's parts."""

    g: Graph
    update: list[Op]
    cluster: Cluster
    factors: InStepFactors

    def __post_init__(self) -> None:
        g = self.g
        elements = sum(self._updated(b, b.name) * b.repeat for b in g.blocks)
        partial = next((o for o in self.update if o.name == "partial.reduce"), None)
        local = [o for o in self.update if not o.axis]
        self.each_element = sum(seconds_of(o, self.cluster, self.factors) for o in local) / max(elements, 1.0)
        summed = sum(p.numel / p.state_shards * n for p, n in g.params if p.trainable) * 4.0 / g.stages
        self.whole = partial is not None and partial.link_bytes > 0.99 * summed
        """Whether all gradients are summed over the tensor-parallel ranks, not only those of norms and biases."""
        self.each_byte = 0.0
        if partial and self.whole:
            self.each_byte = seconds_of(partial, self.cluster) / partial.link_bytes

    def of(self, b: Block, name: str) -> PartCost:
        """The cost of a block, or of the part of it that ``name`` says."""

        def mine(text: str) -> bool:
            return not b.is_layer or text.startswith("mlp") == (name == "mlp")

        forward = self._seconds([o for o in b.forward if mine(o.name)])
        backward = self._seconds([o for o in b.backward if mine(o.name)])
        params = [p for p in b.params if mine(p.name)]
        numel = sum(p.numel for p in params) / max(1.0, sum(p.numel for p in b.params))
        gathers = self._moved(b.gather_forward) * numel, self._moved(b.gather_backward) * numel
        seconds = max(forward, gathers[0]) + max(backward, gathers[1])
        reduced = self._moved(b.reduce) * numel
        once = max(0.0, reduced - backward) if self.g.overlap_reduce else reduced
        once += self._moved(b.after_update) * numel + self._updated(b, name) * self.each_element
        once += sum(p.numel / p.state_shards * 4.0 for p in params if p.trainable) * self.each_byte
        held = sum(
            p.stored_bytes + p.numel * p.working_bytes * (self.g.keep_gathered or p.shards == 1)
            + (p.held_states(self.g.optimizer_bytes) + p.numel * p.grad_bytes / p.grad_shards if p.trainable else 0.0)
            for p in params
        )  # fmt: skip
        return PartCost(seconds, once, held, sum(s.bytes for k, s in b.saved.items() if mine(k)))

    def _seconds(self, ops: list[Op]) -> float:
        compute, sent, _ = in_direction(ops, self.cluster, self.factors)
        return max(compute, len(ops) * self.factors.dispatch) + sent

    def _moved(self, ops: list[Op]) -> float:
        return sum(seconds_of(o, self.cluster) for o in ops)

    def _updated(self, b: Block, name: str) -> float:
        return sum(
            p.numel / max(p.grad_shards, p.state_shards)
            for p in b.params
            if p.trainable and (not b.is_layer or name == b.name or p.name.startswith("mlp") == (name == "mlp"))
        )
