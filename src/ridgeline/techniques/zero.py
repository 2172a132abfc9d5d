"""ZeRO: shard optimizer states (1), gradients (2) and parameters (3) over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.train.build import TrainBuild


class Zero(Technique):
    """ZeRO data parallelism on PyTorch's ``fully_shard``.

    Every stage keeps a rank's parameters, gradients and optimizer states as shards between steps. Stage 3 gathers a
    block's parameters only while it runs, forward and backward; stage 2 keeps them gathered from forward to backward;
    stage 1 also keeps unreduced gradients through gradient accumulation and reduces once per step. Without
    accumulation stages 1 and 2 therefore do the same work.
    """

    card: ClassVar[Card] = Card(
        name="zero",
        title="ZeRO",
        paper="arXiv:1910.02054",
        taxonomy="training/distributed/zero",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="8x larger models and 10x the speed of the state of the art on 400 GPUs",
        min_ranks=2,
    )
    phase: ClassVar[Phase] = "shard"
    splits_batch: ClassVar[bool] = True

    stage: Literal[1, 2, 3] = 2
    """1: optimizer states; 2: gradients too; 3: parameters too."""

    def check(self, e: Experiment) -> None:
        """Needs several data-parallel ranks."""
        self.needs(
            e.data_parallel > 1,
            f"stage {self.stage} shards over data-parallel ranks, but there is only 1 process",
            f"run on several, e.g. --on 2x{e.cluster.device.name}, or drop zero",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shard the states; gather parameters around each block; reduce-scatter gradients after it."""
        ranks = e.data_parallel
        low = g.dtype if g.dtype in ("bf16", "fp16") else None
        g.keep_gathered = self.stage < 3
        g.reduce_every_micro_batch = self.stage >= 2

        def shard(b: Block) -> None:
            gather = 0.0
            grads = 0.0
            for p in b.params:
                width = 2.0 if low and p.bytes_per_element == 4.0 else p.bytes_per_element
                p.shards = p.state_shards = p.grad_shards = ranks
                p.working_bytes = width
                gather += p.numel * width
                if p.trainable:
                    grads += p.numel * p.grad_bytes
            if not gather:
                return
            unshard = Op("all_gather", "communication", "all_gather", "forward", bytes=gather, link_bytes=gather,
                         ranks=ranks, axis="dp")  # fmt: skip
            b.gather_forward.append(unshard)
            if self.stage == 3 and b.name.startswith(("layers", "encoder")):
                b.gather_backward.append(unshard)
            if grads:
                b.reduce.append(
                    Op("reduce_scatter", "communication", "reduce_scatter", "backward", bytes=grads, link_bytes=grads,
                       ranks=ranks, axis="dp")
                )  # fmt: skip

        g.each_block(shard)
        if low:  # parameters arrive already cast
            for b in g.blocks:
                b.forward = [o for o in b.forward if o.kind != "cast" or "dequantise" in o.name]
        largest = max((sum(p.numel * p.working_bytes for p in b.params) for b in g.blocks), default=0.0)
        g.buffers += largest
        return g

    def build(self, run: TrainBuild) -> None:
        """``fully_shard`` each block, then the rest; sums instead of averages; reduce late in stage 1."""
        from contextlib import contextmanager

        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if run.compute_dtype is not None:
            policy = MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32)
        reshard = self.stage == 3
        for block in run.model.layers.values():
            fully_shard(block, mesh=run.mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(run.root, mesh=run.mesh, reshard_after_forward=False, mp_policy=policy)
        for module in run.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                if run.device.type == "cpu":
                    module.set_force_sum_reduction_for_comms(True)

        root = run.root
        assert isinstance(root, FSDPModule)

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            root.set_requires_gradient_sync(last or self.stage >= 2)
            root.set_is_last_backward(last)
            yield

        def release() -> None:
            # Without a backward nothing would free the gathered parameters, and the next forward would reuse them.
            for module in run.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

        run.sync = sync
        run.after_evaluation = release
