"""Memory of a pass in chunks, planned for its number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parts import Part
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild

CHUNK = 2 << 20
"""Minimum bytes of a chunk."""
SLACK = 1.2
"""Size of a chunk allocated for a tensor that exceeds the minimum, relative to the tensor's."""
ALIGNMENT = 64
FROM_REQUESTS: dict[Part, str] = {
    "adapter_table": "which adapters a pass runs under {other} follows from its requests, not from its number of tokens"
}
"""Parts that make passes with the same number of tokens differ."""


class LengthAwareMemory(Technique):
    """Plan each pass's memory for its number of tokens before it runs: lifetimes determine which results may share
    memory, offsets are in chunks that passes of all lengths reuse, and chunks that no pass has used for a while are
    freed (TurboTransformers). Covered are the results of operators that can write into a given tensor, outside
    attention."""

    card: ClassVar[Card] = Card(
        name="length_aware_memory",
        title="Length-aware memory",
        paper="arXiv:2010.05680",
        taxonomy="inference/memory/activations",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="the smallest memory of the allocators compared, with few allocations, at lengths that vary",
        owns=frozenset({"pass_memory"}),
        conflicts=FROM_REQUESTS,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 9
    captured: ClassVar[bool] = False

    keep: int = Field(default=16, ge=0)
    """Number of passes without use after which a chunk is freed."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it saves allocator work, which is not predicted."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs passes whose operators are determined by their number of tokens."""
        planned_passes(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The graph's inference memory is the peak of live bytes, which is what a plan without gaps takes."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Run the forward pass with the planner."""
        from ridgeline.nn.memory.pass_memory import around

        run.memory = around(place_in_chunks, self.keep)


def planned_passes(technique: Technique, e: Experiment) -> None:
    """Refuse techniques with which passes of the same number of tokens have different operators."""
    technique.needs(
        not e.model.num_experts,
        "routing changes the sizes of tensors from pass to pass, so that none can be planned",
        f"use a dense model, or drop {technique.card.name}",
    )
    technique.needs(
        e.world == 1,
        "results that travel between ranks are freed when others have read them, which no plan of one rank knows",
        f"use one process, or drop {technique.card.name}",
    )


def place_in_chunks(
    spans: Sequence[tuple[int, int, int]], chunks: Mapping[int, int]
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """(chunk, offset) of each (bytes, birth, death), and the chunks with any that had to be added, in bytes, by number.

    TurboTransformers' algorithm 2: largest tensor first, into the best-fitting gap between those that are live at the
    same time, in the first chunk that has one; where none has, into a new chunk.
    """
    sizes = dict(chunks)
    held: dict[int, list[tuple[int, int, int, int]]] = {i: [] for i in sizes}  # offset, end, birth, death
    places = [(0, 0)] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: (-spans[i][0], spans[i][1])):
        size, birth, death = -(-spans[i][0] // ALIGNMENT) * ALIGNMENT, spans[i][1], spans[i][2]
        for chunk in sizes:
            offset = _gap(held[chunk], sizes[chunk], size, birth, death)
            if offset is not None:
                break
        else:
            chunk, offset = max(sizes, default=-1) + 1, 0
            sizes[chunk] = max(CHUNK, -(-int(SLACK * size) // ALIGNMENT) * ALIGNMENT)
            held[chunk] = []
        held[chunk].append((offset, offset + size, birth, death))
        places[i] = chunk, offset
    return places, sizes


def _gap(held: list[tuple[int, int, int, int]], room: int, size: int, birth: int, death: int) -> int | None:
    """Offset of the smallest sufficient gap that is free from ``birth`` to ``death``."""
    best, end = None, 0
    for start, stop in [*sorted(h[:2] for h in held if h[2] < death and birth < h[3]), (room, room)]:
        if start - end >= size and (best is None or start - end < best[0]):
            best = start - end, end
        end = max(end, stop)
    return best[1] if best else None
