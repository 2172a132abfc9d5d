"""The analytic implementation of a strategy for every part of the model: see :mod:`ridgeline.spec.sharding`."""

from __future__ import annotations

from itertools import groupby

from ridgeline.graph import training_graph
from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sharding import DIVIDED, IN_PARTS, Sharding, Strategy
from ridgeline.techniques.parallel.divide_layers import divide_block, is_partial
from ridgeline.techniques.parallel.divide_stream import divide_stream

Kind = tuple[Strategy, Strategy, bool]
"""Strategies of a layer's attention and MLP, and whether the stream enters it in parts."""


class OperatorSharding:
    """Rewrites a graph by a :class:`Sharding` over ``t`` ranks."""

    def __init__(self, g: Graph, e: Experiment, plan: Sharding, t: int) -> None:
        self.g, self.e, self.plan, self.t = g, e, plan, t
        self.stream = float(g.tokens * e.model.hidden_size * DTYPE_BYTES[g.dtype])
        self.summed: set[tuple[str, str]] = set()
        """(block, parameter) of whole weights whose gradients are partial: of a rank's own sequences, heads or
        columns."""
        self.rows: list[Block] = []
        """The blocks of a graph with a rank's own sequences."""
        if plan.any_in_parts:
            few = e.training.model_copy(update={"micro_batch_size": e.micro_batch_size // t})
            self.rows = training_graph(e.model_copy(update={"workload": few})).blocks

    def run(self) -> None:
        """Replace the graph's blocks."""
        if self.plan.all_in_parts:
            self.g.residual /= self.t
        out: list[Block] = []
        layers = [i for i, b in enumerate(self.g.blocks) if b.is_layer]
        for i, b in enumerate(self.g.blocks):
            if i in layers:
                out += self._layers(layers) if i == layers[0] else []
            else:
                strategy = self.plan.head if b.is_head else self.plan.embed
                wide = b.is_head and self._entering(len(self.plan.mlp)) != (strategy in IN_PARTS)
                b = self._with(b, self._part(b, i, strategy), [strategy], b.name, b.repeat)
                out.append(self._converted(b, strategy in IN_PARTS) if wide else b)
        self.g.blocks = out

    def _entering(self, layer: int) -> bool:
        return self.plan.leaves_in_parts(layer - 1)

    def _layers(self, places: list[int]) -> list[Block]:
        """The blocks of all layers: one for each run of equal ones (and of these, one for each kind of layer)."""
        m = self.e.model
        kinds: list[Kind] = [(*self.plan.of_layer(i), self._entering(i)) for i in range(m.num_layers)]
        of = [m.layer_kind(i) for i in range(m.num_layers)]
        order = sorted(set(of))  # as the graph's blocks of layers come
        out: list[Block] = []
        for (attention, mlp, parts), run in groupby(range(m.num_layers), key=lambda i: kinds[i]):
            found = list(run)
            for place, kind in zip(places, order, strict=True):
                count = sum(of[i] == kind for i in found)
                if count:
                    name = f"layers.{found[0]}-{found[-1]}"
                    b = self._layer(place, attention, mlp, name, count)
                    wanted = attention in IN_PARTS
                    out.append(self._converted(b, wanted) if parts != wanted else b)
        return out

    def _layer(self, place: int, attention: Strategy, mlp: Strategy, name: str, count: int) -> Block:
        whole = self.g.blocks[place]
        feed = self._part(_of(whole, True), place, mlp, True)
        made = self._part(_of(whole, False), place, attention, False)
        both = Block(name, count, made.params + feed.params, made.forward + feed.forward,
                     made.backward + feed.backward, {**made.saved, **feed.saved})  # fmt: skip
        return self._with(whole, both, [attention, mlp], name, count)

    def _with(self, whole: Block, made: Block, strategies: list[Strategy], name: str, count: int) -> Block:
        """``made`` with its place and temporaries; remembers the parameters whose gradients are partial."""
        share = 1 if "whole" in strategies else self.t
        made.name, made.repeat, made.kind = name, count, whole.kind
        made.workspace, made.backward_workspace = whole.workspace / share, whole.backward_workspace / share
        for p in made.params:
            mlp = p.name.startswith("mlp")
            strategy = strategies[-1] if mlp else strategies[0]
            whole_here = p.numel == next(q.numel for q in whole.params if q.name == p.name)
            few_heads = strategy in DIVIDED and is_partial(p.name, False, self.e.model.joint_qk_norm)
            if few_heads or (strategy in IN_PARTS and whole_here):
                self.summed.add((name, p.name))
        return made

    def _part(self, b: Block, place: int, strategy: Strategy, mlp: bool | None = None) -> Block:
        """One part of the model under a strategy; ``mlp``: which part of a layer it is."""
        b = b.copy()
        if strategy == "batch":
            rows = self.rows[place] if mlp is None else _of(self.rows[place], mlp)
            b.forward, b.backward, b.saved = [*rows.forward], [*rows.backward], {**rows.saved}
            if b.is_head:  # the sum of the ranks' losses
                b.forward.append(Op("loss.reduce", "communication", "all_reduce", bytes=4.0, link_bytes=4.0,
                                    ranks=self.t, axis="tp"))  # fmt: skip
        elif strategy in DIVIDED:
            divide_block(b, self.e.model, self.t, self.stream, self.g.tokens)
            if strategy == "scatter":
                divide_stream(b, self.t, self.stream)
        return b

    def _converted(self, b: Block, wanted: bool) -> Block:
        """A block (or the first of several) before which the stream is cut, whose gradient is then gathered, or
        gathered."""
        direction = "backward" if wanted else "forward"
        gather = Op("stream.gather", "communication", "all_gather", direction, bytes=self.stream,
                    link_bytes=self.stream, ranks=self.t, axis="tp", role="entry")  # fmt: skip
        if wanted:
            b.backward.append(gather)
        else:
            b.forward.insert(0, gather)
        return b


def _of(b: Block, mlp: bool) -> Block:
    """The attention or the MLP of a layer, each with its norm and its residual addition."""

    def mine(name: str) -> bool:
        return name.startswith("mlp") == mlp

    return Block(
        b.name, b.repeat, [p for p in b.params if mine(p.name)], [o for o in b.forward if mine(o.name)],
        [o for o in b.backward if mine(o.name)], {k: s for k, s in b.saved.items() if mine(k)},
    )  # fmt: skip
