"""Ring attention: the sequence is divided over ranks; keys and values are passed around."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import split_bytes, split_gemm, split_saved
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique, degrees

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild

_QUERY_SIDE = {"scores": 1, "values": 1, "values.dprobs": 1, "values.dv": 3, "scores.dq": 1, "scores.dk": 3}
"""Position of the query length in a batched product's (batch, m, n, k)."""


class RingAttention(Technique):
    """Each rank keeps its part of every sequence; keys and values are passed around the ring while attention runs (Liu
    et al. 2023).

    Parts are assigned in zigzag order (the first with the last), so that causal masking leaves all ranks the same
    amount of work.
    """

    card: ClassVar[Card] = Card(
        name="ring_attention",
        title="Ring attention (context parallelism)",
        paper="arXiv:2105.13120",
        taxonomy="training/distributed/ring_attention",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="3.0x longer sequences than tensor parallelism on 64 P100; over 27x with sparse attention",
        min_ranks=2,
        example={"degree": 2},
        needs={"fused_attention": "the score matrix never exists in a ring"},
    )
    phase: ClassVar[Phase] = "sequence"

    degree: int = Field(default=2, ge=2)
    """Ranks that share a sequence."""
    exchange: Literal["ring", "gather"] = "ring"
    """ring: keys and values are passed on while those at hand are attended to. gather: as PyTorch's context_parallel
    does by default, those of every query head are gathered while a rank's own are attended to, and only their gradients
    are passed on, in fp32, in which parts are summed: predicted, not yet run. Compiled code waits for each exchange
    before it goes on."""

    @property
    def runs(self) -> bool:
        """The ring."""
        return self.card.runs and self.exchange == "ring"

    def axes(self) -> dict[str, int]:
        """The mesh axis next to tensor parallelism."""
        return {"cp": self.degree}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two up to 16, where each rank keeps at least 1024 tokens."""
        return [cls(degree=n) for n in degrees(e, min(16, e.training.seq_len // 1024))]

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """The sequence must divide into zigzag halves."""
        length = e.training.seq_len
        self.needs(
            length % (2 * self.degree) == 0,
            f"seq_len {length} does not cut into 2 × {self.degree} zigzag parts",
            f"use a multiple of {2 * self.degree}",
        )
        self.needs(not e.model.is_encoder_decoder, "cross-attention is not passed round", "use a decoder")
        self.needs(e.model.causal, f"{e.model.name} looks both ways, the ring is causal", "use a decoder")
        special = " and ".join([*e.model.score_changes, *(["latent attention"] if e.model.is_latent else [])])
        self.needs(not special, f"the ring's kernel has no {special}", "divide heads by tensor_parallel instead")
        window = e.model.sliding_window or length
        self.needs(window >= length, f"the ring has no sliding window ({window} of {length} tokens)",
                   f"use a seq_len of at most {window}")  # fmt: skip
        rope = e.model.rope_scaling
        self.needs(rope is None or not rope.by_length or length <= rope.original_max_positions, "rotary frequencies"
                   " that depend on a sequence's length would differ between the ranks that hold its parts",
                   f"use a seq_len of at most {rope.original_max_positions if rope else length}")  # fmt: skip
        separate = e.is_training and e.training.separates_documents
        self.needs(not separate or e.cluster.device.kind == "cpu", "PyTorch's flash kernel for GPUs takes no mask, so"
                   " it cannot tell documents apart", "drop ring_attention, or do not mask documents: packing=false for"
                   " examples (one in a row), document_mask=false for text")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Divide the tokens; exchange keys and values in parallel with the attention core."""
        c = self.degree
        parameters = {p.name: p.numel for b in g.blocks for p in b.params}
        kv = min(e.parallel.get("tp", 1), e.model.num_kv_heads)
        pair = 2.0 * g.tokens * e.model.kv_size / kv * DTYPE_BYTES[g.dtype]
        for b in g.blocks:
            b.forward = [_divide(op, c, parameters) for op in b.forward]
            b.backward = [_divide(op, c, parameters) for op in b.backward]
            split_saved(b, list(b.saved), c)
            b.workspace /= c
            b.backward_workspace /= c
        g.tokens //= c
        g.length //= c
        g.residual /= c
        stride = e.stride("cp")
        elements = pair / DTYPE_BYTES[g.dtype]
        if self.exchange == "gather":
            rows = float(g.tokens * e.model.q_size / e.parallel.get("tp", 1))
            waits = has(e, "compiled_pieces")
            g.closing.insert(0, lambda graph: _gather(graph, rows, c, stride, waits))
        else:
            g.closing.insert(0, lambda graph: _exchange(graph, elements, c, stride))
        return g

    def build(self, run: TrainBuild) -> None:
        """Divide every sequence in zigzag order, together with its positions, and compute attention around the ring."""
        from ridgeline.runtime.train_build import Micro
        from ridgeline.techniques.parallel.ring_attention_torch import Ring, backend, zigzag

        assert run.mesh is not None
        ring = Ring(run.mesh.group("cp"))

        def take(micro: Micro) -> Micro:
            mine = zigzag(micro.ids.shape[1], ring.ranks, ring.rank).to(micro.ids.device)
            places = mine if micro.positions is None else micro.positions[:, mine]
            return Micro(micro.ids[:, mine], micro.labels[:, mine], places, micro.documents)

        run.cut.append(take)
        run.fused_attention = backend(ring)


def _divide(op: Op, c: int, parameters: dict[str, float]) -> Op:
    if op.axis:
        return changed(op, bytes=op.bytes / c, link_bytes=op.link_bytes / c)
    if op.kind == "gemm":
        return split_gemm(op, **{"k" if op.role == "weight_gradient" else "m": c})
    if op.kind == "cast":
        return op
    if op.kind == "bmm":
        at = _QUERY_SIDE[op.name.partition(".")[2]]
        shape = tuple(d // c if i == at else d for i, d in enumerate(op.shape))
        return changed(split_bytes(op, c), shape=shape)
    if (
        op.role == "weight_gradient" and op.param in parameters
    ):  # an embedding's gradient: the table, and the tokens' rows
        return op
    return split_bytes(op, c)


def _balanced(op: Op, c: int) -> Op:
    """A causal kernel on zigzag parts: the same work as ``c`` times as many sequences of a part's length."""
    if op.kind != "attention" or not op.causal:
        return op
    batch, heads, kv_heads, q_len, kv_len, dim = op.shape
    return changed(op, shape=(batch * c, heads, kv_heads, q_len, kv_len // c, dim))


def _gather(g: Graph, rows: float, c: int, stride: int, waits: bool) -> None:
    """Keys and values of all query heads, of ``rows`` elements each on a rank, beside the first of ``c`` parts; each of
    the others is added to fp32 sums: results (12 bytes an element), in backward gradients of queries, keys and values
    (30).

    Gradients are passed on ``c`` times, at last to the rank whose keys and values they are of. ``waits``: nothing runs
    beside an exchange, as torch.compile traces each with its wait behind it and keeps that order.
    """

    def link(name: str, kind: str, direction: str, behind: Op, width: float) -> Op:
        size = 2 * rows * width * c
        if kind == "ring":  # of a pass around a ring of c, which is one fewer
            size *= c / (c - 1)
        return Op(name, "communication", kind, direction, bytes=size, link_bytes=size, ranks=c, axis="cp",
                  stride=stride, behind="" if waits else behind.name)  # fmt: skip

    def parted(ops: list[Op], name: str, each: float) -> list[Op]:
        at = next((i for i, o in enumerate(ops) if o.name == name), None)
        if at is None:
            return ops
        core = _balanced(ops[at], c)
        batch, *rest = core.shape
        names = {name: 1 / c, name.replace("flash", "flash.parts"): (c - 1) / c}
        own, others = (
            changed(
                core,
                name=n,
                shape=(max(1, round(batch * share)), *rest),
                flops=core.flops * share,
                bytes=core.bytes * share,
            )
            for n, share in names.items()
        )
        direction = core.direction
        sums = Op(name.replace("flash", "merge"), "attention", "copy", direction, 0, each * rows * (c - 1), core.dtype)
        new = [own, link(f"{name}.gather", "all_gather", direction, own, DTYPE_BYTES[core.dtype]), others, sums]
        if direction == "backward":
            new.append(link(f"{name}.exchange", "ring", direction, others, 4.0))
        return [*ops[:at], *new, *ops[at + 1 :]]

    def gather(b: Block) -> None:
        split_saved(b, ["attention.k", "attention.v"], c)
        b.forward = parted(b.forward, "attention.flash", 12.0)
        b.backward = parted(b.backward, "attention.flash.bwd", 30.0)
        gathered = 2 * DTYPE_BYTES[g.dtype] * rows * c
        b.workspace += gathered + 6 * rows  # and one part's result beside the fp32 sum
        # The sums of three gradients, those received, and one part's.
        b.backward_workspace += gathered + (12 + 8 + 6) * rows

    g.each_block(gather, layers_only=True)
    if waits:
        g.closing.append(_gather_once)  # after all that repeats operators


def _gather_once(g: Graph) -> None:
    """What is computed twice is computed once: recomputation has gathered what backward gathers, too."""
    for b in g.blocks:
        if any(o.name == "attention.flash.gather.again" for o in b.backward):
            b.backward = [o for o in b.backward if o.name != "attention.flash.bwd.gather"]


def _exchange(g: Graph, elements: float, c: int, stride: int) -> None:
    """Keys and values around the ring in forward; in backward once more, and their gradients back in fp32."""
    pair, wide = elements * DTYPE_BYTES[g.dtype], elements * 4.0

    def ring(name: str, direction: str, behind: Op, size: float = pair) -> Op:
        return Op(name, "communication", "ring", direction, bytes=size, link_bytes=size, ranks=c, axis="cp",
                  stride=stride, behind=behind.name)  # fmt: skip

    def pass_round(b: Block) -> None:
        core = next((o for o in b.forward if o.name in ("attention.flash", "attention.scores")), None)
        if core is None:
            return
        if core.kind == "attention":
            b.forward = [_balanced(o, c) for o in b.forward]
            b.backward = [_balanced(o, c) for o in b.backward]
            # The fused kernel reads every key and value, but stores its own part.
            split_saved(b, ["attention.k", "attention.v"], c)
        core = next(o for o in b.forward if o.name == core.name)
        b.forward.insert(b.forward.index(core) + 1, ring("attention.exchange", "forward", core))
        attention = next((o for o in b.backward if o.name in ("attention.flash.bwd", "attention.scores.dk")), None)
        if attention is not None:
            b.backward.append(ring("attention.exchange_again", "backward", attention))
            b.backward.append(ring("attention.exchange_grads", "backward", attention, wide))

    g.each_block(pass_round, layers_only=True)
