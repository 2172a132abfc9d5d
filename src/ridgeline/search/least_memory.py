"""What plans of one split need of memory at least, as far as it is known before they are predicted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ridgeline.graph import Graph
from ridgeline.predict.quick import Quick
from ridgeline.predict.step.peak_memory import accumulates, least_activations
from ridgeline.search.space import Set, moves_activations, offloads


class States(NamedTuple):
    """Bytes that a rank holds in any micro-batch, whatever is recomputed."""

    held: float
    """Parameters, optimizer states, and what the framework holds."""
    gradients: float
    blocked: bool
    """Whether what of them is in the host's memory does not fit there."""


def held_parameters(g: Graph) -> Hashable:
    """Equal for graphs whose parameters take the same memory in each split and placement."""
    return g.optimizer_bytes, g.weights_16bit, *(
        (b.repeat, *((p.numel, p.bytes_per_element, p.working_bytes, p.trainable, p.grad_bytes, p.state_bytes, p.spread)
                     for p in b.params))
        for b in g.blocks
    )  # fmt: skip


@dataclass
class LeastMemory:
    """Of all placements of one split; what does not train has no graph, and nothing is known of it."""

    graph: Graph | None
    """Before placements, none of which takes less for activations and temporaries, unless it moves activations."""
    setting: tuple[Hashable, ...]
    """All that decides the memory of states but for the placement: mesh, parameters, split, accumulation."""
    states: dict[Hashable, States]
    """What is known from predictions, by setting and placement."""
    fixed: Set = ()
    """Techniques of every plan, some of which may move activations or states, too."""
    tight: bool = False
    """Whether activations of the node's micro-batch have been too large in any prediction: only then they are worth
    computing."""
    predicted: bool = False
    """Whether any placement was predicted."""
    beyond_host: set[Set] = field(default_factory=set)
    """Sets of techniques that move activations, of which alone there are more than fit in the host's memory."""

    def learn(self, placement: Set, timed: Quick) -> None:
        """Take in a prediction."""
        self.predicted = True
        self.tight |= not timed.fits and timed.states + timed.gradients <= timed.limit
        moving = self._moving(placement)
        blocked = bool(timed.blocked and not moving)
        self.states[(*self.setting, placement)] = States(timed.states, timed.gradients, blocked)
        if timed.blocked and len(moving) == offloads((*self.fixed, *placement)):
            self.beyond_host.add(moving)

    def activations(self, placement: Set) -> float:
        """Least bytes of activations and temporaries at one time, where they matter."""
        if not self.tight:
            return 0.0
        return self._moved if moves_activations((*self.fixed, *placement)) else self._here

    def exceeds(self, room: float, placement: Set, compute: bool) -> bool:
        """Whether a placement needs more than ``room`` bytes, by its states and gradients or by activations alone once
        a placement was predicted; with ``compute`` also by all of them, or more than the host has."""
        known = self.states.get((*self.setting, placement))
        if known and known.held + known.gradients > room:
            return True
        if self.graph is None or not (compute or self.predicted):
            return False
        activations = self.activations(placement)
        if activations > room or not compute:
            return activations > room
        moving = self._moving(placement)
        resting = self.states.get((*self.setting, tuple(t for t in placement if t not in moving)))
        if moving in self.beyond_host or (resting and resting.blocked):
            return True
        return known is not None and known.held + activations + (known.gradients if self._accumulates else 0.0) > room

    @cached_property
    def _here(self) -> float:
        return sum(least_activations(self.graph, moved=False).values()) if self.graph else 0.0

    @cached_property
    def _moved(self) -> float:
        return sum(least_activations(self.graph).values()) if self.graph else 0.0

    @cached_property
    def _accumulates(self) -> bool:
        return self.graph is not None and accumulates(self.graph)

    def _moving(self, placement: Set) -> Set:
        return tuple(t for t in (*self.fixed, *placement) if t.phase == "offload" and "activations" in t.parts)
