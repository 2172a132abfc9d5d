"""Activation offload: what the backward pass needs waits in host memory."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import host_copy


class ActivationOffload(Technique):
    """Copy each layer's saved activations to host memory after its forward, and back before its backward."""

    card: ClassVar[Card] = Card(
        name="activation_offload",
        title="Activation offload",
        paper="arXiv:1602.08124",
        taxonomy="training/offload/activations",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="a network of 28 GB trained on a 12 GB GPU at 18 % less speed than on an infinite one (vDNN)",
        runs=False,
    )
    phase: ClassVar[Phase] = "offload"
    order: ClassVar[int] = 1

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """One copy out behind each layer's forward, one in before its backward."""
        g.host_activations = True

        def move(b: Block) -> None:
            if b.saved_bytes:
                b.store.append(host_copy("offload.activations", "d2h", b.saved_bytes, "forward"))
                b.gather_backward.append(host_copy("offload.activations_back", "h2d", b.saved_bytes, "backward"))

        def close(graph: Graph) -> None:
            graph.each_block(move, layers_only=True)

        g.closing.append(close)
        return g
