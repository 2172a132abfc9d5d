"""Plain data parallelism: every rank holds the whole model and processes its part of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import reductions
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class DataParallel(Technique):
    """All-reduce gradients in buckets while the backward pass is running, as PyTorch's DDP does.

    Buckets are filled in the reverse order of the parameters and sent in that order on every rank. In a pipeline they
    are sent after the last micro-batch.
    """

    card: ClassVar[Card] = Card(
        name="data_parallel",
        title="Data parallelism (DDP)",
        paper="arXiv:2006.15704",
        taxonomy="training/distributed/data_parallel",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="near-linear scaling to 256 GPUs when communication overlaps with backward",
        min_ranks=2,
        unpredicted=dict.fromkeys(("pretrain", "finetune"), "several ranks train so in any case"),
        owns=frozenset({"batch_split"}),
        changes=frozenset({"replicas", "whole_gradients"}),
        default_in=frozenset({"pretrain", "finetune"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "shard"

    bucket_mb: float = Field(default=25.0, gt=0)
    """Gradients are reduced in buckets of this many MiB."""
    overlap: bool = True
    """Reduce while backward still runs; false: after it, as Megatron-LM did before 2022."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The defaults: overlapping buckets."""
        return [cls()]

    def check(self, e: Experiment) -> None:
        """Needs several ranks."""
        self.needs(
            e.gradient_ranks > 1,
            "there is only 1 process to split the batch over",
            f"run on several, e.g. --on 2x{e.cluster.device.name}",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Insert one gradient all-reduce per block, overlapping with the rest of backward."""
        ranks, stride = e.gradient_ranks, e.stride("cp")
        g.overlap_reduce = self.overlap
        g.bucket_bytes = self.bucket_mb * 2**20
        g.gradients_resident = True  # gradients are views of the reduction buckets

        def reduce(b: Block) -> None:
            b.reduce += reductions(b, "all_reduce", ranks, stride)

        return g.each_block(reduce)

    def build(self, run: TrainBuild) -> None:
        """Put the gradients into buckets that are summed while the last micro-batch's backward runs."""
        from ridgeline.runtime.reducer import Reducer

        assert run.mesh is not None
        mesh = run.mesh
        whole, shared = mesh.group("outer", "inner", "cp"), mesh.group("outer", "cp")

        def fill_buckets() -> None:
            experts = {p for n, p in run.root.named_parameters() if ".experts." in n and run.gradients.experts_divided}
            trained = [p for p in run.root.parameters() if p.requires_grad]
            reducer = Reducer.make(
                trained,
                lambda p: shared if p in experts else whole,
                self.bucket_mb * 2**20,
                self.overlap,
                run.gradients.send_bucket,
            )
            run.sync = reducer.sync
            run.gradients.after_backward.append(reducer.finish)

        run.hooks.filled.append(fill_buckets)
        run.gradients.keep = True  # dropped ones would be made anew beside the buckets that they are copied into
