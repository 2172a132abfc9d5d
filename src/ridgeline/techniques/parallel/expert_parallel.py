"""Expert parallelism: the experts of a mixture are divided over ranks."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ROW
from ridgeline.techniques.parallel.divide_operators import split_bytes, split_gemm
from ridgeline.techniques.technique import Card, Phase, Technique, degrees

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild

BESIDE = "mlp.shared."
"""How the names of an MLP beside the experts begin."""


class ExpertParallel(Technique):
    """Each of ``degree`` ranks holds part of the experts. In training these are data-parallel ranks, and tokens are
    sent to their experts and back (GShard). When serving they are the ranks of tensor_parallel, or without it ranks
    that replicate everything else: every rank has every token, and the outputs of the ranks' experts are summed.

    Routing is assumed to be balanced: every rank gets the same number of tokens; when serving few tokens, the busiest
    rank gets those of one expert.
    """

    card: ClassVar[Card] = Card(
        name="expert_parallel",
        title="Expert parallelism",
        paper="arXiv:2006.16668",
        taxonomy="training/distributed/expert_parallel",
        tasks=frozenset({"pretrain", "finetune", "serve"}),
        validated=frozenset({"serve"}),
        lossless=True,
        claim="600B parameters trained on 2048 TPU v3 cores in 4 days",
        min_ranks=2,
        example={"degree": 2},
        needs_model={"num_experts": 4, "experts_per_token": 2},
        owns=frozenset({"rank_groups"}),
        changes=frozenset({"divided_experts", "divided_tensors"}),
    )
    phase: ClassVar[Phase] = "tensor"
    order: ClassVar[int] = 2
    captured: ClassVar[bool] = False

    degree: int = Field(default=2, ge=2)
    """Ranks that share the experts."""
    capacity: float | None = Field(default=None, gt=0)
    """Capacity of an expert, as a multiple of its equal share of a rank's tokens; excess tokens are dropped. None:
    every token is processed. In training only."""

    def inner(self) -> int:
        """The ranks that share the experts."""
        return self.degree

    def serving_axes(self, axes: Collection[str]) -> dict[str, int]:
        """None beside tensor parallelism, whose ranks it shares."""
        return {} if "tp" in axes else {"ep": self.degree}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two that divide the experts; none without experts."""
        return [cls(degree=n) for n in degrees(e, e.model.num_experts, (e.model.num_experts,))]

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """Needs experts that divide, and in training data-parallel ranks."""
        d, experts = self.degree, e.model.num_experts
        self.needs(experts > 0, f"{e.model.name} has no experts", "use a mixture such as mixtral-8x7b")
        self.needs(experts % d == 0, f"{experts} experts do not divide over {d} ranks", f"use a divisor of {experts}")
        if e.task == "serve":
            tp = e.parallel.get("tp")
            self.needs(tp in (None, d), f"{d} ranks share the experts and {tp} all else; when serving these are one",
                       f"use degree={tp}, or drop tensor_parallel")  # fmt: skip
            self.needs(self.capacity is None, "a capacity would drop tokens of whoever is served",
                       "leave out capacity")  # fmt: skip
            return
        self.needs(
            e.data_parallel % d == 0,
            f"{e.data_parallel} data-parallel ranks do not form groups of {d}",
            f"use a degree that divides {e.data_parallel}, or more devices",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Divide the experts' parameters; send tokens to them and back, forward and backward. When serving, each rank
        computes its share of the rows, and an all-reduce sums the outputs."""
        if e.task == "serve":
            return self._shared(g, e)
        d, stride = self.degree, e.stride("dp")

        def divide(b: Block) -> None:
            experts = {p.name: p.shape[0] for p in b.params if ".experts." in p.name}
            if not experts:
                return
            for p in b.params:
                if p.name in experts:
                    p.numel /= d
                    p.spread = d
            rows = g.tokens * e.model.experts_per_token
            total = e.model.num_experts
            size = DTYPE_BYTES[g.dtype] * e.model.hidden_size * rows
            if self.capacity is not None:
                size *= ceil(self.capacity * rows / total) * total / rows
            for direction in ("forward", "backward"):
                ops = [_fewer(op, d, experts, rows) for op in getattr(b, direction)]
                setattr(b, direction, _sent(ops, size, d, stride, direction))
            if self.capacity is None:
                sent = Op("mlp.dispatch.counts", "communication", "alltoall", bytes=8.0 * total, link_bytes=8.0 * total,
                          dtype="int64", ranks=d, axis="ep", stride=stride)  # fmt: skip
                first = next(i for i, op in enumerate(b.forward) if op.kind == "alltoall")
                b.forward.insert(first, sent)

        return g.each_block(divide, layers_only=True)

    def _shared(self, g: Graph, e: Experiment) -> Graph:
        d, summed = self.degree, "tp" in e.parallel  # which sums every layer's output already
        size = g.tokens * e.model.hidden_size * DTYPE_BYTES[g.dtype]
        reduce = Op("mlp.reduce", "communication", "all_reduce", bytes=size, link_bytes=size, ranks=d,
                    axis="tp" if summed else "ep")  # fmt: skip

        def divide(b: Block) -> None:
            experts = {p.name for p in b.params if ".experts." in p.name}
            if not experts:
                return
            for p in b.params:
                beside = p.name.startswith(BESIDE) and not summed  # tensor_parallel divides it too
                p.numel /= d if beside or p.name in experts else 1
            touched = next(op.experts for op in b.forward if op.kind == "gemm" and op.param in experts)
            by = min(d, touched)  # all wait for the rank with the most tokens, which has at least those of one expert
            out: list[Op] = []
            last = [op.name for op in b.forward if op.name in ("mlp.combine", f"{BESIDE}add")][-1]
            for op in b.forward:
                if op.kind == "gemm" and op.param in experts:
                    rows, n, k = op.shape
                    op = changed(split_bytes(op, by), shape=(max(1, round(rows / by)), n, k), experts=op.experts / by)
                elif op.kind == "gemm" and op.name.startswith(BESIDE):
                    op = split_gemm(op, k=d) if op.name.endswith(ROW) else split_gemm(op, n=d)
                elif op.param in experts or op.name in ("mlp.act", f"{BESIDE}act"):
                    op = split_bytes(op, by if op.name == "mlp.act" else d)
                out.append(op)
                if op.name == last and not summed:
                    out.append(reduce)
            b.forward = out

        return g.each_block(divide, layers_only=True)

    def serve(self, run: ServeBuild) -> None:
        """Keep this rank's experts; the ranks' outputs are summed."""
        from ridgeline.nn.model.moe import MoE
        from ridgeline.nn.parallel.divide_packed import hold_experts

        assert run.mesh is not None
        group = run.mesh.group("inner", "tp")
        for moe in [m for m in run.model.modules() if isinstance(m, MoE)]:
            hold_experts(moe, group)

    def build(self, run: TrainBuild) -> None:
        """Keep this rank's experts; send sorted tokens to theirs by all-to-all."""
        import torch
        from torch import nn
        from torch.distributed.tensor import DTensor, Shard

        from ridgeline.nn.model.moe import MoE
        from ridgeline.nn.parallel.collectives import local
        from ridgeline.techniques.parallel.expert_parallel_torch import TokenExchange

        assert run.mesh is not None
        mesh, rank = run.mesh, run.mesh.at("inner")
        exchange = TokenExchange(mesh.group("inner"), self.capacity)
        for moe in [m for m in run.model.modules() if isinstance(m, MoE)]:
            moe.run = exchange
            for name, p in list(moe.experts.named_parameters()):
                part = local(p.detach()).chunk(self.degree)[rank].clone(memory_format=torch.contiguous_format)
                if isinstance(p, DTensor):
                    both = mesh.mesh["inner", "tp"]
                    mine = DTensor.from_local(part, both, [Shard(0), *p.placements], run_check=False)
                else:
                    mine = DTensor.from_local(part, mesh.sub("inner"), [Shard(0)], run_check=False)
                moe.experts.register_parameter(name, nn.Parameter(mine, requires_grad=p.requires_grad))
        run.gradients.experts_divided = True


def _fewer(op: Op, d: int, experts: dict[str, int], rows: int) -> Op:
    """The same tokens over fewer experts: the same FLOPs, fewer weight bytes (those of the chosen experts)."""
    if op.kind != "gemm" or op.param not in experts:
        return op
    held = max(1, experts[op.param] // d)
    touched = held * (1 - (1 - 1 / held) ** rows)
    shape = op.shape
    if op.role == "weight_gradient":
        n, k = round(op.shape[0] / op.experts), op.shape[1]
        shape = (round(n * touched), k, max(1, round(rows / touched)))
    else:
        n, k = op.shape[1:]
    before, after = (rows * (n + k) + n * k * chosen for chosen in (op.experts, touched))
    return changed(op, bytes=op.bytes * after / before, shape=shape, experts=touched)


def _sent(ops: list[Op], size: float, d: int, stride: int, direction: str) -> list[Op]:
    """Insert the two exchanges of one direction, ``size`` bytes each: the tokens to their chosen experts, and back."""
    out: list[Op] = []
    for op in ops:
        out.append(op)
        if op.name in ("mlp.dispatch", "mlp.combine.bwd", "mlp.experts.down_proj", "mlp.dispatch.bwd"):
            exchange = Op(f"{op.name}.exchange", "communication", "alltoall", direction, bytes=size, link_bytes=size,
                          ranks=d, axis="ep", stride=stride)  # fmt: skip
            out.append(exchange)
    return out
