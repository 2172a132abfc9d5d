"""SWARM: pipeline stages trained by unreliable peers of a wide-area network."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Pipeline, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.wire import Wire, wire_bytes
from ridgeline.techniques.technique import Card, Phase, Technique, degrees


class Swarm(Technique):
    """Divide the layers into stages of several peers each; every micro-batch takes its own way through them, to faster
    peers more often, with activations and gradients in 8 bits. Gradients are summed within a stage once the batch is
    whole. Peers may differ, come and go: what a lost one held is computed again. Run by ``ridgeline swarm peer`` and
    ``swarm train``."""

    card: ClassVar[Card] = Card(
        name="swarm",
        title="SWARM parallelism",
        paper="arXiv:2301.11913",
        taxonomy="training/distributed/swarm",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="a model of 1B shared parameters on preemptible T4 GPUs with less than 200 Mbit/s between them",
        tolerance=0.05,
        quality="the loss of plain activations is that of one machine; 8 bits round what passes between stages",
        runs=False,
        runs_by="ridgeline swarm",
        min_ranks=2,
        example={"stages": 2},
        changes=frozenset({"stages", "whole_gradients"}),
    )
    phase: ClassVar[Phase] = "split"

    stages: int = Field(default=3, ge=2)
    """Number of stages; the other ranks are further peers of the stages."""
    rtt: float = Field(default=0.1, ge=0)
    """Seconds between two peers and back."""
    rate: float = Field(default=25e6, gt=0)
    """Bytes/s of each peer's connection (25e6: 200 Mbit/s)."""
    wire: Wire = "blockwise8"
    """Activations and their gradients between stages: 8 bits with a scale for each block, or plain."""
    shared: int = Field(default=1, ge=1)
    """Number of consecutive layers of a stage that share their weights (1: none do), as in the paper's model."""

    def axes(self) -> dict[str, int]:
        """The outermost mesh axis."""
        return {"pp": self.stages}

    def layers_per_weights(self) -> int:
        """As ``shared`` says."""
        return self.shared

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two, over the network of the defaults: a search does not know another."""
        return [cls(stages=n) for n in degrees(e, e.model.num_layers)]

    def check(self, e: Experiment) -> None:
        """There must be a layer for each stage, and no parameter that two stages have."""
        layers = e.model.num_layers
        self.needs(layers >= self.stages, f"{layers} layers do not fill {self.stages} stages",
                   f"use at most {layers} stages")  # fmt: skip
        self.needs(not e.model.tie_embeddings, "the first and the last stage would share the embedding",
                   "train a model with tie_embeddings = false")  # fmt: skip
        self.needs(self.shared == 1 or layers % (self.stages * self.shared) == 0,
                   f"{layers} layers do not divide into {self.stages} stages of groups of {self.shared}",
                   "use a divisor of each stage's layers for shared")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Stages pass activations, and gradients back, over the network; a backward pass computes the forward again,
        and gradients are summed within a stage after the last one. Memory is that of a pipeline's micro-batches in
        flight, an upper bound: a peer holds the activations of one."""
        network = (self.rtt, self.rate)
        pipe = Pipeline(self.stages, "1f1b")
        g.pipeline = pipe

        def connect(graph: Graph) -> None:
            size = wire_bytes(graph.tokens, e.model.hidden_size, self.wire, DTYPE_BYTES[graph.dtype])
            send = Op("send", "communication", "p2p", bytes=size, link_bytes=size, ranks=2, axis="pp", wan=network)
            graph.pipeline = replace(pipe, send=send)
            graph.each_block(_again, layers_only=True)
            for b in graph.blocks:
                b.reduce = [changed(op, wan=network) for op in b.reduce]

        def share(b: Block) -> None:
            for p in b.params:
                p.numel /= self.shared

        g.closing.append(connect)
        return g.each_block(share, layers_only=True)


def _again(b: Block) -> None:
    """The forward pass once more in backward."""
    b.backward[:0] = [changed(op, name=f"{op.name}.again", direction="backward", recompute=True)
                      for op in b.forward if not op.axis]  # fmt: skip
