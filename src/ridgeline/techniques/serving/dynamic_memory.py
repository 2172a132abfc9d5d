"""Buffers shared by all layers that grow when they are too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.serving.length_aware_memory import FROM_REQUESTS, planned_passes
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild


class DynamicMemory(Technique):
    """Allocate the results of a pass from a pool of buffers, each busy or idle, that all layers share: an idle one that
    is large enough, otherwise an additional or enlarged one (EET). The pool grows with the longest pass and never
    shrinks. Covered are the results of operators that can write into a given tensor, outside attention."""

    card: ClassVar[Card] = Card(
        name="dynamic_memory",
        title="Dynamic memory",
        paper="arXiv:2104.12470",
        taxonomy="inference/memory/activations",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="EET as a whole runs a decoder layer 1.40-4.20x as fast as FasterTransformer 4.0 on an A100",
        owns=frozenset({"pass_memory"}),
        conflicts=FROM_REQUESTS,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 9
    captured: ClassVar[bool] = False

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it saves allocator work, which is not predicted."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs passes whose operators are determined by their number of tokens."""
        planned_passes(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The graph's inference memory is the peak of live bytes; how far a pool exceeds it is not predicted."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Run the forward pass with the pool."""
        from ridgeline.nn.memory.pass_memory import around

        run.memory = around(place_in_buffers)


def place_in_buffers(
    spans: Sequence[tuple[int, int, int]], buffers: Mapping[int, int]
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """(buffer, 0) of each (bytes, birth, death) in order of birth, and the required buffer sizes in bytes, by number.

    A tensor gets the smallest idle buffer that holds it; if all idle ones are too small, the largest of them grows; if
    none is idle, there is one more.
    """
    sizes = dict(buffers)
    busy: dict[int, int] = {}  # buffer → when it becomes idle
    places = [(0, 0)] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i][1]):
        size, birth, death = spans[i]
        idle = [b for b in sizes if busy.get(b, 0) <= birth]
        fitting = [b for b in idle if sizes[b] >= size]
        if fitting:
            chosen = min(fitting, key=lambda b: sizes[b])
        elif idle:
            chosen = max(idle, key=lambda b: sizes[b])
        else:
            chosen = len(sizes)
        sizes[chosen] = max(size, sizes.get(chosen, 0))
        busy[chosen] = death
        places[i] = chosen, 0
    return places, sizes
