"""Tensor parallelism: the matrices of every layer are divided over the ranks of a group."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import COLUMN, LATENT, ROW
from ridgeline.spec.scheduling import OWN, engine_name
from ridgeline.spec.workload import Serve
from ridgeline.techniques.parallel.divide_operators import (
    ATTENTION_CORE,
    split_bytes,
    split_gemm,
    split_saved,
)
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique, degrees, nearest_divisor

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild

_DIVIDED = ("q", "k", "v", "probs", "probs.mask", "probs.dropped", "context", "q_raw", "k_raw", "q_norm.stats",
            "k_norm.stats")  # fmt: skip


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
    on GPUs): predicted, not yet run."""

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
        for what, size in (("attention heads", e.model.num_heads), ("MLP columns", e.model.intermediate_size)):
            near = nearest_divisor(gcd(size, e.world), self.degree)
            self.needs(
                size % self.degree == 0,
                f"{size} {what} of {e.model.name} do not divide over {self.degree} ranks",
                f"use degree={near}, or another that divides {size}"
                if near > 1
                else f"use a degree that divides {size}, and a multiple of as many devices",
            )
        kv = e.model.num_kv_heads
        self.needs(
            kv % self.degree == 0 or self.degree % kv == 0,
            f"{kv} key/value heads neither divide over {self.degree} ranks nor repeat evenly on them",
            f"use a degree that divides {kv} or is a multiple of it",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Divide shapes, parameters and saved activations; insert all-reduces where partial sums arise.

        Our own serving engine replicates the embedding and the head; experts that expert_parallel divides are left to
        it.
        """
        t = self.degree
        whole = isinstance(e.workload, Serve) and engine_name(e.workload.engine, e.cluster.device.name) == OWN
        apart = e.task == "serve" and has(e, "divided_experts")
        kv = min(t, e.model.num_kv_heads)
        g.kv_cache /= min(t, e.model.cached_heads)
        turned = 1 if e.model.is_latent else kv  # whose rotated key is the same for all heads
        for b in g.blocks:
            if whole and b.name in ("embed", "head"):
                continue
            mixed = apart and any(".experts." in p.name for p in b.params)
            b.forward = [op if mixed and op.module == "mlp" else _divide(op, t, kv, turned) for op in b.forward]
            b.backward = [_divide(op, t, kv, turned) for op in b.backward]
            for p in b.params:
                if not (mixed and ".experts." in p.name):
                    _divide_param(p, t, kv, e.model.joint_qk_norm)
            b.forward, b.backward = _reduced(b, t, g.tokens * e.model.hidden_size * DTYPE_BYTES[g.dtype])
            if e.model.joint_qk_norm:  # the ranks sum their squares, and in backward the gradients of these
                b.forward, b.backward = (_square_sums(ops, t, g.tokens * 4.0) for ops in (b.forward, b.backward))
            _divide_saved(b, t, kv)
            b.workspace /= t
            b.backward_workspace /= t
        sequence = has(e, "sequence_parts")
        joint = e.model.joint_qk_norm
        g.closing.append(lambda graph: _sum_partial(graph, t, sequence, joint))
        if self.overlap:
            g.closing.append(_overlapped)
        return g

    def build(self, run: TrainBuild) -> None:
        """Divide this rank's layers; parameters become ``DTensor`` s, arithmetic stays local."""
        self.needs(not self.overlap, "overlap=true can be predicted, not yet run", "use overlap=false")
        from ridgeline.nn.parallel.divide import Divider

        assert run.mesh is not None
        self._whole_heads(run.experiment)
        run.divider = Divider(run.mesh.sub("tp"))
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


def _square_sums(ops: list[Op], t: int, size: float) -> list[Op]:
    out: list[Op] = []
    for op in ops:
        if op.name.endswith(("q_norm", "k_norm", "q_norm.bwd", "k_norm.bwd")):
            out.append(Op(f"{op.name}.reduce", "communication", "all_reduce", op.direction, bytes=size, link_bytes=size,
                          ranks=t, axis="tp"))  # fmt: skip
        out.append(op)
    return out


def _leaf(name: str) -> tuple[str, str]:
    """("attention.q_proj.lora_a.dx") → ("q_proj", "lora_a.dx")."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part in COLUMN or part in ROW), -1)
    return (parts[at], ".".join(parts[at + 1 :])) if at >= 0 else ("", name)


def _divide(op: Op, t: int, kv: int, turned: int) -> Op:
    layer, tail = _leaf(op.name)
    if layer:
        by = kv if layer in ("k_proj", "v_proj") else t
        return _divide_linear(op, layer in COLUMN, tail, by)
    suffix = op.name.partition(".")[2]
    if op.module == "attention" and suffix in ATTENTION_CORE:
        by = turned if suffix.startswith("k_rope") else t
        shape = (op.shape[0] // t, *op.shape[1:]) if op.shape else ()
        return changed(split_bytes(op, by), shape=shape)
    if suffix in ("q_norm", "k_norm", "q_norm.bwd", "k_norm.bwd"):
        return split_bytes(op, t if suffix[0] == "q" else kv)
    if suffix in ("act", "act.bwd", "shared.act", "shared.act.bwd") and op.module == "mlp":
        return split_bytes(op, t)
    if op.name.startswith("head.out"):
        return _divide_linear(op, True, op.name.removeprefix("head.out").removeprefix("."), t)
    if op.kind == "loss" or op.name in ("embed.tokens", "embed.tokens.dw"):
        return split_bytes(op, t)
    return op


_SIDES = {  # the dimension of an operator's (m, n, k) that a layer's output (True) or input (False) is
    True: {"": "n", "dx": "k", "dw": "m"},
    False: {"": "k", "dx": "n", "dw": "n"},
}


def _divide_linear(op: Op, column: bool, tail: str, by: int) -> Op:
    """Divide the operators of one linear layer and of its adapter along the output (column) or the input (row)."""
    part = tail.rpartition(".")[2]
    if op.kind == "gemm":
        if tail.startswith("lora_a" if column else "lora_b"):
            return op  # the dimension that faces the undivided stream is replicated
        return split_gemm(op, **{_SIDES[column][part if part in ("dx", "dw") else ""]: by})
    whole = ("accumulate",) if column else ("db", "lora_add", "bwd")
    return op if part in whole else split_bytes(op, by)


def _sum_partial(g: Graph, t: int, sequence: bool, joint: bool) -> None:
    """One collective, once per step, for replicated parameters whose gradient is partial on each rank."""
    partial = [(p, n) for p, n in g.params if p.trainable and _is_partial(p.name, sequence, joint)]
    size = sum(p.numel / p.state_shards * 4.0 * n for p, n in partial)
    if size:
        size /= g.stages
        g.before_update.insert(0, Op("partial.reduce", "communication", "all_reduce", "update", bytes=size,
                                     link_bytes=size, ranks=t, axis="tp"))  # fmt: skip


def _overlapped(g: Graph) -> None:
    """Overlap every gather with the product that reads it, and every sum with the one that produces it."""
    for b in g.blocks:
        if b.is_layer:
            b.forward, b.backward = _beside(b.forward), _beside(b.backward)


def _beside(ops: list[Op]) -> list[Op]:
    products = [(i, op.name) for i, op in enumerate(ops) if op.kind == "gemm"]
    out: list[Op] = []
    for i, op in enumerate(ops):
        if op.axis == "tp" and not op.behind:
            reads = op.kind == "all_gather"
            near = [name for at, name in products if (at > i) is reads]
            op = changed(op, behind=near[0 if reads else -1], pieces=op.ranks) if near else op
        out.append(op)
    return out


def _is_partial(name: str, sequence: bool, joint: bool) -> bool:
    """Whether each rank's gradient of a parameter is partial: it saw only its heads, its experts' columns, or its
    tokens. ``joint``: norms over all heads are divided with them."""
    layer, tail = _leaf(name)
    if name.split(".")[-2] in LATENT:
        return True
    if layer:
        held = tail == ("lora_a" if layer in COLUMN else "lora_b")
        return held or (sequence and layer in ROW and tail == "bias")
    if name.endswith((".experts.down_bias", "router.bias")):
        return True
    if ".experts." in name or name in ("embed.tokens.weight", "head.out.weight", "head.out.bias"):
        return False
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return not joint
    return sequence or name.endswith("router.weight")


_BY_HEAD_OR_COLUMN = (".sinks", ".experts.gate_bias", ".experts.up_bias")


def _divide_param(p: Param, t: int, kv: int, joint: bool) -> None:
    layer, tail = _leaf(p.name)
    by = 1
    if layer:
        column = layer in COLUMN
        by = kv if layer in ("k_proj", "v_proj") else t
        if tail == ("lora_a" if column else "lora_b") or (tail in ("bias", "spans") and not column):
            by = 1
    elif (
        p.name in ("embed.tokens.weight", "head.out.weight", "head.out.bias")
        or p.name.endswith(".sinks")
        or p.name.endswith((".experts.gate_bias", ".experts.up_bias"))
    ):
        by = t
    elif joint and p.name.endswith(("q_norm.weight", "k_norm.weight")):
        by = t if p.name.endswith("q_norm.weight") else kv
    p.numel /= by


def _divide_saved(b: Block, t: int, kv: int) -> None:
    for prefix in ("attention", "cross_attention"):
        for name in _DIVIDED:
            split_saved(b, [f"{prefix}.{name}"], kv if name in ("k", "v", "k_raw", "k_norm.stats") else t)
    inner = [f"{mlp}.{name}" for mlp in ("mlp", "mlp.shared") for name in ("up", "gate", "inner", "acted")]
    split_saved(b, [*inner, "logits"], t)


def _reduced(b: Block, t: int, stream: float) -> tuple[list[Op], list[Op]]:
    """The block's operators with an all-reduce wherever the ranks hold partial sums of the residual stream."""

    def reduce(name: str, direction: str, size: float = stream) -> Op:
        return Op(name, "communication", "all_reduce", direction, bytes=size, link_bytes=size, ranks=t, axis="tp")

    forward: list[Op] = []
    ends = [op.name for op in b.forward if op.name in ("mlp.down_proj", "mlp.combine", "mlp.shared.add")][-1:]
    for op in b.forward:
        forward.append(op)
        layer = op.name.rpartition(".")[2]
        if op.kind == "gemm" and layer == "o_proj":
            forward.append(reduce(f"{op.name.rpartition('.')[0]}.reduce", "forward"))
        elif op.name in ends:  # experts' outputs are summed once, when combined
            forward.append(reduce("mlp.reduce", "forward"))
        elif op.name == "embed.tokens":
            forward.append(reduce("embed.reduce", "forward"))
    if any(op.kind == "loss" for op in b.forward):  # the row maxima, sums and targets of a divided vocabulary
        rows = b.saved["logits"].bytes / 4 / next(op.shape[1] * t for op in forward if op.name == "head.out")
        forward += [reduce("loss.peak", "forward", 4 * rows), reduce("loss.reduce", "forward", 8 * rows)]
    backward = list(b.backward)
    readers = {"attention": ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj"), "mlp": ("gate_proj", "up_proj"),
               "head": ("out",)}  # fmt: skip
    for label, names in readers.items():
        last = max((i for i, op in enumerate(backward) if op.name.endswith(tuple(f".{n}.dx" for n in names))),
                   default=-1)  # fmt: skip
        if last >= 0:
            backward.insert(last + 1, reduce(f"{label}.input.reduce", "backward"))
    return forward, backward
