"""Many fine-tuned tasks over one base, in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serving import ServeBuild


class MultiAdapter(Technique):
    """Serve requests of different adapters (LoRA, BitFit, bottleneck, diff pruning, masks) in one batch: the product
    with the base's weights is shared by all, each task adds its own part for its rows (PetS). Adapters come and go
    while the engine runs; their memory is taken out of the cache's."""

    card: ClassVar[Card] = Card(
        name="multi_adapter",
        title="Parameter-efficient multi-task serving",
        paper="PetS, USENIX ATC 2022",
        taxonomy="inference/multi-task/adapters",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="26x the tasks, 1.53x (edge) to 1.63x (server) the throughput of one model a task",
    )
    phase: ClassVar[Phase] = "loop"

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """What adapters add is small, and which are used is not known before: predicted as the base alone."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Give the engine a task table."""
        run.adapters = True
