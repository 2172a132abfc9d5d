"""Activation offload: saved activations are kept in host memory until the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class ActivationOffload(Technique):
    """Copy each layer's saved activations to host memory after its forward, and back before its backward.

    Layers are fetched in the order of the backward pass, one layer ahead.
    """

    card: ClassVar[Card] = Card(
        name="activation_offload",
        title="Activation offload",
        paper="arXiv:1602.08124",
        taxonomy="training/offload/activations",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="a network of 28 GB trained on a 12 GB GPU at 18 % less speed than on an infinite one (vDNN)",
        owns=frozenset({"activations"}),
    )
    phase: ClassVar[Phase] = "offload"
    order: ClassVar[int] = 1

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """One copy to the host after each layer's forward, one back before its backward."""
        g.host_activations = True

        def move(b: Block) -> None:
            if b.saved_bytes:
                b.store.append(host_copy("offload.activations", "d2h", b.saved_bytes, "forward"))
                b.gather_backward.append(host_copy("offload.activations_back", "h2d", b.saved_bytes, "backward"))

        def close(graph: Graph) -> None:
            graph.each_block(move, layers_only=True)
            graph.host_bytes += sum(o.link_bytes * b.repeat for b in graph.blocks for o in b.store) / graph.stages

        g.closing.append(close)
        return g

    def build(self, run: TrainBuild) -> None:
        """Wrap each layer's forward."""
        from ridgeline.nn.memory.tiered_store import TieredStore
        from ridgeline.techniques.memory.activation_offload_torch import offload_layers

        run.store = run.store or TieredStore(run.device)
        offload_layers(run, run.store)
