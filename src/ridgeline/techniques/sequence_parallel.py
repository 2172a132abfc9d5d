"""Megatron's sequence parallelism: what tensor parallelism leaves whole is divided along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import split_bytes

if TYPE_CHECKING:
    from ridgeline.train.build import TrainBuild

_STREAM = ("input", "attention_input", "cross_input", "cross_normed", "mlp_sum", "mlp_input", "attention_sum",
           "final_sum", "head.normed", "head.input", "embed.sum")  # fmt: skip


class SequenceParallel(Technique):
    """Divide norms, residual additions and dropout over the tensor-parallel ranks (Korthikanti et al. 2022, section 4).

    Each all-reduce becomes a reduce-scatter and an all-gather of the same volume; the activations that every rank held
    whole are held in parts, and gathered once more for the weight gradients, beside the input gradients.
    """

    card: ClassVar[Card] = Card(
        name="sequence_parallel",
        title="Sequence parallelism (Megatron)",
        paper="arXiv:2205.05198",
        taxonomy="training/distributed/sequence_parallel",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="5x less activation memory with selective recomputation, over 90 % of its time overhead gone",
        min_ranks=2,
        requires=("tensor_parallel",),
    )
    phase: ClassVar[Phase] = "tensor"
    order: ClassVar[int] = 1

    def check(self, e: Experiment) -> None:
        """Needs tensor parallelism, and a sequence that divides."""
        self.needs(e.plan.has("tensor_parallel"), "it divides what tensor_parallel leaves whole, which is not on",
                   "add tensor_parallel, or use ring_attention for long sequences")  # fmt: skip
        t = e.parallel.get("tp", 1)
        length = e.training.seq_len
        self.needs(length % t == 0, f"seq_len {length} does not divide over {t} ranks", f"use a multiple of {t}")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Replace the all-reduces; divide the stream's operators and saved activations."""
        t = e.parallel["tp"]
        g.residual /= t
        for b in g.blocks:
            b.forward = [new for op in b.forward for new in _rewritten(op, t)]
            b.backward = [new for op in b.backward for new in _rewritten(op, t)]
            b.backward += _regathers(b)
            for name, saved in b.saved.items():
                norm = name.endswith("norm.stats") and "attention." not in name
                if name in _STREAM or name.endswith("residual.mask") or norm:
                    b.saved[name] = Saved(saved.bytes / t, saved.users)
        return g

    def build(self, run: TrainBuild) -> None:
        """Let the divided layers receive and return parts of the sequence."""
        assert run.divider is not None
        run.divider.sequence = True
        for chunk in run.chunks:
            chunk.model.sequence_parts = run.experiment.parallel["tp"]
        run.partial[:] = run.divider.partial



def _rewritten(op: Op, t: int) -> list[Op]:
    if op.kind == "all_reduce" and op.axis == "tp" and not op.name.startswith("loss"):
        scatter = changed(op, name=f"{op.name}_scatter", kind="reduce_scatter")
        if op.name == "embed.reduce":
            return [scatter]
        return [scatter, changed(op, name=f"{op.name.removesuffix('.reduce')}.gather", kind="all_gather")]
    outside = op.module in ("norm", "residual") or op.name.endswith(("o_proj.db", "down_proj.db"))
    return [split_bytes(op, t) if outside and not op.axis else op]


def _regathers(b: Block) -> list[Op]:
    """The divided inputs of column-parallel layers, whole again for their weight gradients."""
    found = []
    for op in b.backward:
        if op.name.endswith(".input.reduce_scatter") and op.kind == "reduce_scatter":
            label = op.name.partition(".")[0]
            beside = next((o.name for o in b.backward if o.module == label and o.name.endswith("_proj.dx")), "")
            if beside:
                found.append(changed(op, name=f"{label}.regather", kind="all_gather", behind=beside))
    return found
