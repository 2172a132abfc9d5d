"""ZeRO: shard optimizer states (1), gradients (2) and parameters (3) over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import reductions

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
    degree: int | None = Field(default=None, ge=2)
    """Ranks that share one copy, if not all. Fewer is hybrid sharding: shards inside a node, copies across nodes."""

    def inner(self) -> int:
        """The ranks that share one copy, if not all."""
        return self.degree or 1

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Every stage over all data-parallel ranks, and over one node of them."""
        out: list[Technique] = []
        for stage in (1, 2, 3):
            out.append(cls(stage=stage))
            if e.cluster.nodes > 1:
                out.append(cls(stage=stage, degree=e.cluster.devices_per_node))
        return out

    def check(self, e: Experiment) -> None:
        """Needs several data-parallel ranks."""
        self.needs(
            e.gradient_ranks > 1,
            f"stage {self.stage} shards over data-parallel ranks, but there is only 1 process",
            f"run on several, e.g. --on 2x{e.cluster.device.name}, or drop zero",
        )
        self.needs(
            self.degree is None or e.data_parallel % self.degree == 0,
            f"{e.data_parallel} data-parallel ranks do not form groups of {self.degree}",
            f"use a degree that divides {e.data_parallel}, or drop it for all",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shard the states; gather parameters around each block; reduce-scatter gradients after it."""
        parts = e.parallel.get("cp", 1)
        ranks, stride = (self.degree or e.data_parallel) * parts, e.stride("cp")
        copies = e.gradient_ranks // ranks
        low = g.dtype if g.dtype in ("bf16", "fp16") else None
        if g.low_weights or g.pipeline:
            self._shard_lazily(g, ranks, stride)
        else:
            self._shard_fully(g, ranks, stride)
        if copies > 1:  # each shard's gradient is then averaged over the copies
            for b in g.blocks:
                b.reduce += [
                    changed(o, name="all_reduce", kind="all_reduce", bytes=o.bytes / o.ranks,
                            link_bytes=o.link_bytes / o.ranks, ranks=copies, stride=stride * ranks)
                    for o in b.reduce if o.kind == "reduce_scatter"
                ]  # fmt: skip
        if low:  # parameters arrive already cast
            for b in g.blocks:
                b.forward = [o for o in b.forward if o.kind != "cast" or "dequantise" in o.name]
        if self.stage == 3:  # lower stages gather in forward only, before activations have piled up
            g.buffers += max((sum(p.numel * p.working_bytes for p in b.params) for b in g.blocks), default=0.0)
        return g

    def _shard_fully(self, g: Graph, ranks: int, stride: int) -> None:
        """``fully_shard``: shards at rest in every stage, gathered at least once per micro-batch."""
        low = g.dtype in ("bf16", "fp16")
        g.keep_gathered = self.stage < 3
        g.reduce_every_micro_batch = self.stage >= 2
        for b in g.blocks:
            for p in b.params:
                share = max(1, ranks // p.spread)
                p.working_bytes = 2.0 if low and p.bytes_per_element == 4.0 else p.bytes_per_element
                p.shards = p.state_shards = p.grad_shards = share
            self._gather(b, ranks, stride)
            b.reduce += reductions(b, "reduce_scatter", ranks, stride)

    def _shard_lazily(self, g: Graph, ranks: int, stride: int) -> None:
        """DeepSpeed's and Megatron's way: only what the stage names is divided; stages 1 and 2 hand the new weights
        round once, after the update."""
        g.reduce_every_micro_batch = self.stage >= 2 and not g.pipeline
        for b in g.blocks:
            for p in b.params:
                share = max(1, ranks // p.spread)
                p.state_shards = share
                p.grad_shards = share if self.stage >= 2 else 1
                if self.stage == 3:
                    p.shards, p.working_bytes = share, p.bytes_per_element
            if self.stage == 3:
                self._gather(b, ranks, stride)
            b.reduce += reductions(b, "reduce_scatter", ranks, stride)
        if self.stage < 3:
            size = sum(p.numel * p.bytes_per_element * n for p, n in g.params if p.trainable) / g.stages
            g.after_update.append(
                Op("all_gather", "communication", "all_gather", "update", bytes=size, link_bytes=size, ranks=ranks,
                   axis="dp", stride=stride)
            )  # fmt: skip

    def _gather(self, b: Block, ranks: int, stride: int) -> None:
        """The gathers around a block; experts divided over ranks are gathered over fewer."""
        sizes: dict[int, float] = {}
        for p in b.params:
            sizes[p.spread] = sizes.get(p.spread, 0.0) + p.numel * p.working_bytes
        for spread, size in sizes.items():
            if ranks // spread > 1:
                unshard = Op("all_gather", "communication", "all_gather", "forward", bytes=size, link_bytes=size,
                             ranks=ranks // spread, axis="dp", stride=stride * spread)  # fmt: skip
                b.gather_forward.append(unshard)
                if self.stage == 3 and b.name.startswith(("layers", "encoder")):
                    b.gather_backward.append(unshard)

    def build(self, run: TrainBuild) -> None:
        """``fully_shard`` each block, then the rest; sums instead of averages; reduce late in stage 1."""
        from contextlib import contextmanager

        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        assert run.mesh is not None
        policy = MixedPrecisionPolicy()
        if run.compute_dtype is not None:
            policy = MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32)
        if self.degree and self.degree < run.experiment.data_parallel:
            mesh = run.mesh.pair(("outer",), ("inner", "cp"))
        else:
            mesh = run.mesh.sub("outer", "inner", "cp")
        reshard = self.stage == 3
        for chunk in run.chunks:
            for block in chunk.model.layers.values():
                held = set()  # experts that are divided over ranks are shared by fewer
                if run.experts_divided and hasattr(block.mlp, "experts"):
                    if run.mesh.size("outer", "cp") > 1:
                        others = run.mesh.sub("outer", "cp")
                        fully_shard(block.mlp.experts, mesh=others, reshard_after_forward=reshard, mp_policy=policy)
                    else:
                        held = set(block.mlp.experts.parameters())
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=held or None
                )
            fully_shard(chunk, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        sharded = [m for chunk in run.chunks for m in chunk.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_gradient_divide_factor(1.0)
            if run.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)

        def release() -> None:
            # Without a backward nothing would free the gathered parameters, and the next forward would reuse them.
            for module in sharded:
                module.reshard()

        run.after_evaluation = release
        root = run.root
        if not isinstance(root, FSDPModule):
            return  # a pipeline's runtime gathers before its first action and reduces after its last

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            root.set_requires_gradient_sync(last or self.stage >= 2)
            root.set_is_last_backward(last)
            yield

        run.sync = sync
