"""ZeRO: shard optimizer states (1), gradients (2) and parameters (3) over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.graph.schedule import gathers
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import reductions
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import of_kind
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ridgeline.runtime.train_build import TrainBuild
    from ridgeline.techniques.parallel.zero_torch import Among


class Zero(Technique):
    """ZeRO data parallelism.

    In PyTorch's ``fully_shard`` every stage keeps a rank's parameters, gradients and optimizer states as shards between
    steps. Stage 3 gathers a block's parameters only while it runs, forward and backward; stage 2 keeps them gathered
    from forward to backward; stage 1 also keeps unreduced gradients through gradient accumulation and reduces once per
    step. Without accumulation stages 1 and 2 therefore do the same work.

    With ``mixed_precision:weights=low`` stage 3 shards the 16-bit weights and their fp32 master copies. In stages 1 and
    2, as in DeepSpeed and Megatron-LM, the 16-bit weights are replicated on every rank; master weights and moments
    (stage 2: also summed gradients) are sharded, and the new weights are all-gathered after the update. Gradients are
    reduced in fp32.
    """

    card: ClassVar[Card] = Card(
        name="zero",
        title="ZeRO",
        paper="arXiv:1910.02054",
        taxonomy="training/distributed/zero",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="8x larger models and 10x the speed of the state of the art on 400 GPUs",
        min_ranks=2,
        owns=frozenset({"batch_split"}),
        changes=frozenset({"divided_tensors", "shards"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "shard"

    stage: Literal[1, 2, 3] = 2
    """1: optimizer states; 2: gradients too; 3: parameters too."""
    degree: int | None = Field(default=None, ge=2)
    """Number of ranks among which one copy is sharded; by default all. Fewer is hybrid sharding: shards inside a node,
    copies across nodes."""

    reshard: bool | None = None
    """Free a layer's gathered parameters after its forward pass and gather them again for backward. None: in stage 3,
    but not in a pipeline, where it would happen for every micro-batch."""
    gathered: Literal["layer", "tensor"] | None = None
    """What one collective gathers: a layer, or one parameter tensor of it (DeepSpeed's first releases, over one network
    card at a time). In stages 1 and 2, whole tensors then belong to ranks, to which their gradients are reduced and
    from which they are broadcast (InternEvo). Predicted, not yet run."""
    backward_prefetch: Literal["pre", "post"] = "pre"
    """Gather the next layer's parameters in backward before this layer's gradients are computed, or only after they
    have been (PyTorch's first FSDP, as Composer uses it): predicted, not yet run."""
    prefetch: int = Field(default=1, ge=0)
    """Number of layers whose parameters are gathered ahead of use, in forward and backward."""

    def owns(self) -> frozenset[Part]:
        """Hybrid sharding forms process groups of its own."""
        return self.card.owns | ({"rank_groups"} if self.degree else frozenset())

    def changes(self) -> frozenset[Part]:
        """Below stage 3 parameters are complete when they are used next."""
        return self.card.changes | ({"replicas"} if self.stage < 3 else frozenset())

    def reshards(self, pipelined: bool) -> bool:
        """Whether gathered parameters are freed after forward."""
        return self.stage == 3 and not pipelined if self.reshard is None else self.reshard

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

    @classmethod
    def saves_memory(cls, e: Experiment) -> str:
        """All states are sharded."""
        return "zero:stage=3" if e.data_parallel > 1 and (not (own := of_kind(e, cls)) or own.stage != 3) else ""

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

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

        self.needs(
            self.stage == 3 or not self.reshard,
            f"stage {self.stage} keeps gathered parameters from forward to backward",
            "use stage=3, or drop reshard",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shard the states; gather parameters around each block; reduce-scatter gradients after it."""
        parts = e.parallel.get("cp", 1)
        ranks, stride = (self.degree or e.data_parallel) * parts, e.stride("cp")
        copies = e.gradient_ranks // ranks
        low = g.dtype if g.dtype in ("bf16", "fp16") else None
        if g.weights_16bit and self.stage < 3:
            self._shard_update(g, ranks, stride)
        else:
            self._shard_fully(g, ranks, stride)
        if copies > 1:  # each shard's gradient is then averaged over the copies
            for b in g.blocks:
                b.reduce += [
                    changed(o, name="all_reduce", kind="all_reduce", bytes=o.bytes / o.ranks,
                            link_bytes=o.link_bytes / o.ranks, ranks=copies, stride=stride * ranks)
                    for o in b.reduce if o.kind == "reduce_scatter"
                ]  # fmt: skip
        if low:  # parameters are gathered already cast
            for b in g.blocks:
                b.forward = [o for o in b.forward if o.kind != "cast" or not o.param or "dequantize" in o.name]
        if self.stage == 3 and not g.keep_gathered:  # otherwise gathered only in forward, before activations accumulate
            layers = [b for b in g.blocks if b.is_layer]
            sizes = (sum(p.numel * p.working_bytes for p in b.params if p.spread == 1) for b in layers)
            g.buffers += max(sizes, default=0.0)
        return g

    def _shard_fully(self, g: Graph, ranks: int, stride: int) -> None:
        """``fully_shard``: parameters are stored as shards in every stage and gathered at least once per micro-batch
        (in a pipeline: once per step, and reduced after its last backward pass, beside nothing).

        What is outside the layers is one unit: gathered before the first, reduced after the last.
        """
        low = g.dtype in ("bf16", "fp16")
        pipe = g.pipeline
        g.gradients_resident = False
        reshard = self.reshards(pipe is not None)
        if pipe:
            g.overlap_reduce = False
            g.layer_gathers = 1.0
            if reshard:
                g.layer_gathers = gathers(pipe.schedule, pipe.degree, g.accumulation, pipe.chunks)
        g.keep_gathered = not reshard
        g.gathers_after_reduction = self.backward_prefetch == "post"
        if self.gathered == "tensor":
            g.closing.append(_gather_to_recompute)
        g.reduce_every_micro_batch = self.stage >= 2 and not pipe
        for b in g.blocks:
            for p in b.params:
                share = max(1, ranks // p.spread)
                p.working_bytes = 1.0 if p.coded else 2.0 if low and p.bytes_per_element == 4.0 else p.bytes_per_element
                p.shards = p.state_shards = share
                # Gradients that wait for the last micro-batch are kept unsharded.
                p.grad_shards = 1 if g.accumulation > 1 and not g.reduce_every_micro_batch else share
        layers = [b for b in g.blocks if b.is_layer]
        ends = [b for b in g.blocks if b not in layers]
        units = [[b] for b in layers] + ([[b] for b in ends] if g.pipeline else [ends])
        for unit in units:
            if not unit:
                continue
            unshard = self._gathers(unit, ranks, stride)
            unit[0].gather_forward += unshard
            if reshard and unit[0] in layers and not pipe:
                unit[0].gather_backward += unshard
            whole = replace(unit[0], params=[p for b in unit for p in b.params])
            unit[0].reduce += reductions(whole, "reduce_scatter", ranks, stride)

    def _shard_update(self, g: Graph, ranks: int, stride: int) -> None:
        """The DeepSpeed and Megatron scheme for 16-bit weights: they stay replicated, and only what the stage names is
        divided. New weights are all-gathered once, after the update."""
        early = self.stage == 2 and not g.pipeline
        g.reduce_every_micro_batch = early
        g.gradients_resident = self.stage == 1
        tensors = max(1, sum(n for p, n in g.params if p.trainable))
        for b in g.blocks:
            for p in b.params:
                p.state_shards = max(1, ranks // p.spread)
                p.grad_shards = p.state_shards if early else 1
            sizes: dict[int, float] = {}
            for p in (p for p in b.params if p.trainable):
                sizes[p.spread] = sizes.get(p.spread, 0.0) + p.numel * p.bytes_per_element
            fresh = [changed(o, direction="update") for o in self._all_gathers(sizes, ranks, stride)]
            summed = reductions(b, "reduce_scatter", ranks, stride)
            if self.gathered == "tensor":
                share = min(1.0, ranks / tensors)  # of its tensors, each of which goes its own way
                parts = max(1, round(share * sum(p.trainable for p in b.params)))
                fresh, summed = _one_by_one(fresh, "broadcast", parts), _one_by_one(summed, "reduce", parts)
            b.reduce += summed
            b.after_update += fresh

    def _gathers(self, blocks: list[Block], ranks: int, stride: int) -> list[Op]:
        """The gathers before some blocks."""
        if self.gathered == "tensor":
            return [op for b in blocks for p in b.params
                    for op in self._all_gathers({p.spread: p.numel * p.working_bytes}, ranks, stride)]  # fmt: skip
        sizes: dict[int, float] = {}
        for p in (p for b in blocks for p in b.params):
            sizes[p.spread] = sizes.get(p.spread, 0.0) + p.numel * p.working_bytes
        return self._all_gathers(sizes, ranks, stride)

    def _all_gathers(self, sizes: dict[int, float], ranks: int, stride: int) -> list[Op]:
        """``sizes``: bytes by the number of ranks over which they are already divided (experts) and need not be
        gathered."""
        return [
            Op("all_gather", "communication", "all_gather", "forward", bytes=size, link_bytes=size,
               ranks=ranks // spread, axis="dp", stride=stride * spread, rails=int(self.gathered == "tensor"))
            for spread, size in sizes.items()
            if ranks // spread > 1
        ]  # fmt: skip

    def build(self, run: TrainBuild) -> None:
        """``fully_shard`` each block, then the rest; sums instead of averages; late reduction in stage 1.

        16-bit weights with master copies are replicated in stages 1 and 2, and only their update is sharded.
        """
        self.needs(self.gathered != "tensor", "gathered=tensor can be predicted, not yet run", "use gathered=layer")
        self.needs(self.backward_prefetch == "pre", "backward_prefetch=post can be predicted, not yet run",
                   "use backward_prefetch=pre")  # fmt: skip
        if run.update.weights_16bit is not None and self.stage < 3:
            from ridgeline.techniques.parallel.zero_torch import ShardedUpdate

            run.hooks.filled.append(lambda: ShardedUpdate(run, self.stage, self._among(run)).start())
            return
        from torch.distributed.fsdp import FSDPModule

        from ridgeline.techniques.parallel.zero_torch import integers_too, keep_wide

        reshard = self.reshards(len(run.chunks) > 1 or run.chunks[0] is not run.root)
        with integers_too():
            self._shard(run, reshard)
        sharded = [m for chunk in run.chunks for m in chunk.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_gradient_divide_factor(1.0)
            if run.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)
            if run.update.weights_16bit is not None:
                keep_wide(module)

        def release() -> None:
            # Without a backward nothing would free the gathered parameters, and the next forward would reuse them.
            for module in sharded:
                module.reshard()

        run.hooks.after_evaluation = release
        root = run.root
        if not isinstance(root, FSDPModule):
            run.sync = lambda last: nullcontext()
            return  # a pipeline's runtime gathers before its first action and reduces after its last

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            root.set_requires_gradient_sync(last or self.stage >= 2)
            root.set_is_last_backward(last)
            yield

        run.sync = sync

    def _shard(self, run: TrainBuild, reshard: bool) -> None:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if run.compute_dtype is not None or run.update.weights_16bit is not None:
            policy = MixedPrecisionPolicy(param_dtype=run.compute_dtype, reduce_dtype=torch.float32)
        mesh, others = self._ranks(run)
        for chunk in run.chunks:
            for block in chunk.model.blocks.values():
                feed: Any = block.mlp
                held = set()  # experts that are divided over ranks are sharded over fewer
                if run.gradients.experts_divided and hasattr(feed, "experts"):
                    if others.size() > 1:
                        fully_shard(feed.experts, mesh=others, reshard_after_forward=reshard, mp_policy=policy)
                    else:
                        held = set(feed.experts.parameters())
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=held or None
                )
            fully_shard(chunk, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
            self._prefetch([*chunk.model.blocks.values()])

    def _ranks(self, run: TrainBuild) -> tuple[DeviceMesh, DeviceMesh]:
        """The ranks over which parameters are sharded, and those for experts that are already divided over ranks."""
        assert run.mesh is not None
        others = run.mesh.sub("outer", "cp")
        if self.degree and self.degree < run.experiment.data_parallel:
            return run.mesh.pair(("outer",), ("inner", "cp")), others
        return run.mesh.sub("outer", "inner", "cp"), others

    def _among(self, run: TrainBuild) -> Callable[[str], Among | None]:
        """The same by the name of a parameter; None: it is already divided as far as possible."""
        from ridgeline.techniques.parallel.zero_torch import Among

        mesh, others = self._ranks(run)

        def among(name: str) -> Among | None:
            if not run.gradients.experts_divided or ".experts." not in name:
                return Among(mesh)
            return Among(others, experts=True) if others.size() > 1 else None

        return among

    def _prefetch(self, layers: list[Any]) -> None:
        """Tell each layer which ones to gather while it computes; PyTorch's own choice is the next one."""
        if self.prefetch == 1:
            return
        n = self.prefetch
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + n])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - n) : i][::-1])


_REUSED = 2e9
"""Bytes of 16-bit parameters within which DeepSpeed keeps one that is used again (stage3_max_reuse_distance: 1e9)."""


def _gather_to_recompute(g: Graph) -> None:
    """A layer is gathered to be recomputed; what is not used again soon is freed, and gathered again for gradients."""
    for b in g.blocks:
        if any(o.recompute for o in b.backward):
            gathers, after = b.gather_backward, 0.0
            for o in reversed(gathers):
                if 2 * after > _REUSED:  # what is used in between, forward and backward
                    b.gather_backward = [*b.gather_backward, o]
                after += o.link_bytes


def _one_by_one(ops: list[Op], kind: str, parts: int) -> list[Op]:
    """Each collective as ``parts`` of another kind, one after the other and over all network cards."""
    return [changed(o, name=kind, kind=kind, bytes=o.bytes / parts, link_bytes=o.link_bytes / parts, rails=0)
            for o in ops for _ in range(parts)]  # fmt: skip
