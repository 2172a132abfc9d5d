"""Tensor parallelism: the matrices of every layer are divided over the ranks of a group."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.scheduling import OWN, engine_name
from ridgeline.spec.sharding import Sharding
from ridgeline.spec.workload import Pretrain, Serve
from ridgeline.techniques.parallel.divide_layers import divide_block, is_partial
from ridgeline.techniques.parallel.operator_sharding import OperatorSharding
from ridgeline.techniques.registry import has, refuse, remaining_model, techniques_of
from ridgeline.techniques.technique import Card, Phase, Technique, degrees, nearest_divisor

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild


class TensorParallel(Technique):
    """Divide attention heads, MLP columns and the vocabulary over ``degree`` ranks (Megatron-LM).

    Query, key, value, gate and up projections are divided by output, output and down projections by input, so one
    all-reduce of the residual stream per sub-layer and direction is the only communication. With more ranks than
    key/value heads each rank holds a whole head, so some heads are replicated.
    """

    card: ClassVar[Card] = Card(
        name="tensor_parallel",
        title="Tensor parallelism",
        paper="arXiv:1909.08053",
        taxonomy="training/distributed/tensor_parallel",
        tasks=frozenset({"pretrain", "finetune", "generate", "serve"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune", "generate", "serve"}),
        claim="8.3B parameters on 512 V100 at 15.1 PFLOP/s, 76 % of the single-GPU rate per GPU",
        min_ranks=2,
        example={"degree": 2},
        runs_in=frozenset({"pretrain", "finetune", "serve"}),
        changes=frozenset({"divided_linears", "divided_tensors"}),
    )
    phase: ClassVar[Phase] = "tensor"

    degree: int = Field(default=8, ge=2)
    """Ranks that share every layer."""
    overlap: bool | None = None
    """Overlap the gathers and sums of divided layers with the adjacent matrix products, in pieces (Transformer Engine
    on GPUs; in compiled blocks PyTorch's asynchronous tensor parallelism, which does not pipeline the sum of several
    products): predicted, not yet run."""
    sharding: tuple[str, ...] | None = None
    """In pretrain: PART=STRATEGY or PART.FIRST-LAST=STRATEGY for parts embed, attention, mlp and head, as Alpa assigns
    them (arXiv:2201.12023). Strategy reduce (the default) and scatter divide weights, batch divides the sequences of
    the micro-batch, whole nothing; scatter and batch keep the residual stream in parts of the batch."""

    def sharded(self, e: Experiment) -> Sharding | None:
        """The strategy of every part; None: weights are divided everywhere. Raises :class:`Incompatible` for entries
        that cannot be read."""
        if self.sharding is None:
            return None
        try:
            return Sharding.parse(self.sharding, e.model.num_layers)
        except ValueError as why:
            raise Incompatible(f"tensor_parallel: {why}", "see `ridgeline techniques tensor_parallel`") from None

    def axes(self) -> dict[str, int]:
        """The innermost mesh axis."""
        return {"tp": self.degree}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two within a node."""
        sizes = (e.model.num_heads, e.model.intermediate_size)
        return [cls(degree=n) for n in degrees(e, e.cluster.devices_per_node, sizes)]

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """Heads and MLP width must be divisible."""
        m = remaining_model(e)
        for what, size in (("attention heads", m.num_heads), ("MLP columns", m.intermediate_size)):
            near = nearest_divisor(gcd(size, e.world), self.degree)
            self.needs(
                size % self.degree == 0,
                f"{size} {what} of {m.name} do not divide over {self.degree} ranks",
                f"use degree={near}, or another that divides {size}"
                if near > 1
                else f"use a degree that divides {size}, and a multiple of as many devices",
            )
        kv = m.num_kv_heads
        self.needs(
            kv % self.degree == 0 or self.degree % kv == 0,
            f"{kv} key/value heads neither divide over {self.degree} ranks nor repeat evenly on them",
            f"use a degree that divides {kv} or is a multiple of it",
        )
        if (plan := self.sharded(e)) is not None:
            self._check_sharding(e, plan)

    def _check_sharding(self, e: Experiment, plan: Sharding) -> None:
        """Decoders whose layers read the residual stream one after the other, in pre-training on unpacked rows."""
        m, w, fix = e.model, e.workload, "leave out sharding"
        self.needs(isinstance(w, Pretrain) and not w.document_mask, "sharding is for task pretrain, rows without"
                   " document masks", fix)  # fmt: skip
        plain = (
            m.causal
            and not (m.is_encoder_decoder or m.parallel_residual or m.is_latent)
            and m.head == "lm"
            and m.final_norm
        )
        self.needs(plain, f"sharding is for decoders with sequential layers, plain attention, a final norm and a head;"
                   f" {m.name} is not one", fix)  # fmt: skip
        self.needs(not self.overlap, "sharding and overlap exclude each other", fix)
        torn = plan.torn()
        self.needs(torn is None, f"attention and mlp of layer {torn} need the residual stream in different forms",
                   "give both scatter or batch, or both reduce or whole")  # fmt: skip
        same = (plan.embed == "reduce" or plan.embed == "scatter") == (plan.head in ("reduce", "scatter"))
        same = same and (plan.embed == "whole") == (plan.head == "whole")
        self.needs(not m.tie_embeddings or same, f"embed={plan.embed} and head={plan.head} share one matrix",
                   "divide both, or give both batch or whole")  # fmt: skip
        self.needs(
            not plan.any_in_parts or e.micro_batch_size % self.degree == 0,
            f"micro_batch_size {e.micro_batch_size} does not divide over {self.degree} ranks (scatter, batch)",
            f"use a multiple of {self.degree}",
        )
        for part in ("sequence_parts", "divided_experts"):
            refuse(self, e, part, "{other} does not combine with sharding")
        early = next((t.card.name for t in techniques_of(e.plan) if t.phase in ("adapt", "sequence")), "")
        self.needs(not early, f"{early} does not combine with sharding", fix)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Divide shapes, parameters and saved activations; insert all-reduces where partial sums arise.

        Our own serving engine replicates the embedding and the head; experts that expert_parallel divides are left to
        it.
        """
        t, m = self.degree, remaining_model(e)
        whole = isinstance(e.workload, Serve) and engine_name(e.workload.engine, e.cluster.device.name) == OWN
        apart = e.task == "serve" and has(e, "divided_experts")
        g.kv_cache /= min(t, m.cached_heads)
        if (plan := self.sharded(e)) is not None:
            made = OperatorSharding(g, e, plan, t)
            made.run()
            g.closing.append(lambda graph: _sum_partial(graph, t, False, e.model.joint_qk_norm, made.summed))
            return g
        for b in g.blocks:
            if whole and b.name in ("embed", "head"):
                continue
            stream = g.tokens * m.hidden_size * DTYPE_BYTES[g.dtype]
            divide_block(b, m, t, stream, g.tokens, lambda name: apart and ".experts." in name)
        sequence = has(e, "sequence_parts")
        joint = e.model.joint_qk_norm
        g.closing.append(lambda graph: _sum_partial(graph, t, sequence, joint))
        if self.overlap:
            compiled = has(e, "compiled_pieces")
            g.closing.append(lambda graph: _overlapped(graph, compiled))
        return g

    def build(self, run: TrainBuild) -> None:
        """Divide this rank's layers; parameters become ``DTensor`` s, arithmetic stays local."""
        self.needs(not self.overlap, "overlap=true can be predicted, not yet run", "use overlap=false")
        from ridgeline.nn.parallel.divide import Divider

        assert run.mesh is not None
        self._whole_heads(run.experiment)
        run.divider = Divider(run.mesh.sub("tp"), sharding=self.sharded(run.experiment))
        run.divider.transformer(run.model)
        for chunk in {id(c): c for c in (run.root, *run.chunks)}.values():
            chunk.loss = run.divider.loss
        run.gradients.partial += run.divider.partial

    def _whole_heads(self, e: Experiment) -> None:
        kv = e.model.num_kv_heads
        self.needs(kv % self.degree == 0, f"{kv} key/value heads on {self.degree} ranks can be predicted, not yet run:"
                   " heads would have to be held several times", f"use a degree that divides {kv}")  # fmt: skip

    def serve(self, run: ServeBuild) -> None:
        """Divide the layers, dense or quantized, and with them the cache; embedding and head are replicated."""
        from ridgeline.nn.parallel.divide_packed import divide

        assert run.mesh is not None
        self._whole_heads(run.experiment)
        for block in run.model.layers.values():
            divide(block, run.mesh.group("tp"), experts=not has(run.experiment, "divided_experts"))
        run.kv_heads = max(1, run.kv_heads // self.degree)  # latents, which have one head, are held by all


def _sum_partial(
    g: Graph, t: int, sequence: bool, joint: bool, summed: Collection[tuple[str, str]] | None = None
) -> None:
    """One collective, once per step, for replicated parameters whose gradient is partial on each rank; ``summed``:
    (block, parameter) of them, where every part of the model has its own strategy."""
    size = 0.0
    for b in g.blocks:
        for p in b.params:
            partial = is_partial(p.name, sequence, joint) if summed is None else (b.name, p.name) in summed
            if p.trainable and partial:
                size += p.numel / p.state_shards * 4.0 * b.repeat
    if size:
        size /= g.stages
        g.before_update.insert(0, Op("partial.reduce", "communication", "all_reduce", "update", bytes=size,
                                     link_bytes=size, ranks=t, axis="tp"))  # fmt: skip


def _overlapped(g: Graph, compiled: bool) -> None:
    """Overlap every gather with the product that reads it, and every sum with the one that produces it."""
    for b in g.blocks:
        if b.is_layer:
            b.forward, b.backward = _beside(b.forward, compiled), _beside(b.backward, compiled)


def _beside(ops: list[Op], compiled: bool) -> list[Op]:
    """``compiled``: as torch.compile rewrites what it has traced (its pass micro_pipeline_tp, and
    torch.distributed._symmetric_memory)."""
    products = [(i, op.name) for i, op in enumerate(ops) if op.kind == "gemm"]
    out: list[Op] = []
    for i, op in enumerate(ops):
        out.append(op)
        if op.axis != "tp" or op.behind:
            continue
        reads = op.kind == "all_gather"
        near = [name for at, name in products if (at > i) is reads]
        if not near or (compiled and _of_several(op, near)):
            continue
        out[-1] = changed(op, behind=near[0 if reads else -1], pieces=op.ranks)
        if compiled:
            out.append(_through_buffers(op))
    return out


def _of_several(op: Op, before: list[str]) -> bool:
    """Whether what is summed over the ranks has itself been added up, as the gradients of one input of several layers:
    only a sum whose input comes from a product is pipelined with it."""
    part = op.name.partition(".")[0]
    readers = [name for name in before if name.startswith(f"{part}.") and name.endswith(".dx")]
    return ".input." in op.name and len(readers) > 1


def _through_buffers(op: Op) -> Op:
    """What pieces take beside their products and transfers. A rank copies its part into a buffer that others read; of a
    sum it gets a piece from every rank, in a tensor of the whole's size, and adds them up."""
    own = op.link_bytes / op.ranks
    moved = 2 * own if op.kind == "all_gather" else op.link_bytes + own
    return Op(f"{op.name}.pieces", op.module, "copy", op.direction, bytes=moved, dtype=op.dtype, recompute=op.recompute)
