"""Plain data parallelism: every rank holds the whole model and works on its part of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import reductions

if TYPE_CHECKING:
    from ridgeline.train.build import TrainBuild


class DataParallel(Technique):
    """All-reduce gradients in buckets while the backward pass still runs (PyTorch DDP)."""

    card: ClassVar[Card] = Card(
        name="data_parallel",
        title="Data parallelism (DDP)",
        paper="arXiv:2006.15704",
        taxonomy="training/distributed/data_parallel",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="near-linear scaling to 256 GPUs when communication overlaps with backward",
        min_ranks=2,
    )
    phase: ClassVar[Phase] = "shard"
    splits_batch: ClassVar[bool] = True

    bucket_mb: float = Field(default=25.0, gt=0)
    """Gradients are reduced in buckets of this many MiB."""
    overlap: bool = True
    """Reduce while backward still runs; false: after it, as Megatron-LM did before 2022."""

    @property
    def runs(self) -> bool:
        """Reduction after backward is not run yet."""
        return self.overlap

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """As it is: buckets that overlap."""
        return [cls()]

    def check(self, e: Experiment) -> None:
        """Needs several ranks, and nothing else that splits the batch."""
        self.needs(
            e.data_parallel > 1,
            "there is only 1 process to split the batch over",
            f"run on several, e.g. --on 2x{e.cluster.device.name}",
        )
        self.needs(
            not e.plan.has("zero"),
            "zero already splits the batch over the same ranks",
            "keep one of data_parallel and zero",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Insert one gradient all-reduce per block, overlapping with the rest of backward."""
        ranks, stride = e.data_parallel, e.stride("dp")
        g.overlap_reduce = self.overlap
        g.gradients_resident = True  # gradients are views of the reduction buckets

        def reduce(b: Block) -> None:
            b.reduce += reductions(b, "all_reduce", ranks, stride)

        return g.each_block(reduce)

    def build(self, run: TrainBuild) -> None:
        """Wrap the model in ``DistributedDataParallel``; it averages, and the loss is a sum, so scale it back."""
        from contextlib import nullcontext

        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(
            run.root, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        run.call = wrapped
        run.loss_scale *= run.world
        run.keep_gradients = True  # dropped ones would be made anew beside the buckets that they are copied into
        run.sync = lambda last: nullcontext() if last else wrapped.no_sync()
