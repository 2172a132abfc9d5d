"""Megatron's sequence parallelism: what tensor parallelism replicates is divided along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_stream import divide_stream
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class SequenceParallel(Technique):
    """Divide norms, residual additions and dropout over the tensor-parallel ranks (Korthikanti et al. 2022, section 4).

    Each all-reduce becomes a reduce-scatter and an all-gather of the same volume; the activations that every rank
    replicated are divided, and gathered once more for the weight gradients, in parallel with the input gradients.
    """

    card: ClassVar[Card] = Card(
        name="sequence_parallel",
        title="Sequence parallelism (Megatron)",
        paper="arXiv:2205.05198",
        taxonomy="training/distributed/sequence_parallel",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="5x less activation memory with selective recomputation, over 90 % of its time overhead gone",
        changes=frozenset({"sequence_parts"}),
        needs={"divided_linears": "it divides what tensor_parallel leaves whole, which is not on"},
    )
    phase: ClassVar[Phase] = "tensor"
    order: ClassVar[int] = 1

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """The sequence must be divisible."""
        t = e.parallel.get("tp", 1)
        length = e.training.seq_len
        self.needs(length % t == 0, f"seq_len {length} does not divide over {t} ranks", f"use a multiple of {t}")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Replace the all-reduces; divide the residual stream's operators and saved activations."""
        t = e.parallel["tp"]
        g.residual /= t
        size = g.residual * t
        for b in g.blocks:
            divide_stream(b, t, size)
        return g

    def build(self, run: TrainBuild) -> None:
        """Make the divided layers receive and return parts of the sequence."""
        assert run.divider is not None
        run.divider.sequence = True
        for chunk in run.chunks:
            chunk.model.sequence_parts = run.experiment.parallel["tp"]
        run.gradients.partial[:] = run.divider.partial
