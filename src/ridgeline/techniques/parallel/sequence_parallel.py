"""Megatron's sequence parallelism: what tensor parallelism replicates is divided along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import split_bytes
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild

_STREAM = ("input", "attention_input", "cross_input", "cross_normed", "mlp_sum", "mlp_input", "attention_sum",
           "final_sum", "head.normed", "head.input", "embed.sum")  # fmt: skip


class SequenceParallel(Technique):
    """Divide norms, residual additions and dropout over the tensor-parallel ranks (Korthikanti et al. 2022, section 4).

    Each all-reduce becomes a reduce-scatter and an all-gather of the same volume; the activations that every rank
    replicated are divided, and gathered once more for the weight gradients, in parallel with the input gradients.
    """

    card: ClassVar[Card] = Card(
        name="sequence_parallel",
        title="Sequence parallelism (Megatron)",
        paper="arXiv:2205.05198",
        taxonomy="training/distributed/sequence_parallel",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="5x less activation memory with selective recomputation, over 90 % of its time overhead gone",
        changes=frozenset({"sequence_parts"}),
        needs={"divided_linears": "it divides what tensor_parallel leaves whole, which is not on"},
    )
    phase: ClassVar[Phase] = "tensor"
    order: ClassVar[int] = 1

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """The sequence must be divisible."""
        t = e.parallel.get("tp", 1)
        length = e.training.seq_len
        self.needs(length % t == 0, f"seq_len {length} does not divide over {t} ranks", f"use a multiple of {t}")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Replace the all-reduces; divide the residual stream's operators and saved activations."""
        t = e.parallel["tp"]
        g.residual /= t
        size = g.residual * t
        for b in g.blocks:
            b.forward = _gathered([_rewritten(op, t) for op in b.forward], _INPUTS, size, t, "forward")
            b.backward = _gathered([_rewritten(op, t) for op in b.backward], _OUTPUTS, size, t, "backward")
            b.backward += _regathers(b, size, t)
            for name, saved in b.saved.items():
                norm = name.endswith("norm.stats") and "attention." not in name
                if name in _STREAM or name.endswith("residual.mask") or norm:
                    b.saved[name] = Saved(saved.bytes / t, saved.users)
        return g

    def build(self, run: TrainBuild) -> None:
        """Make the divided layers receive and return parts of the sequence."""
        assert run.divider is not None
        run.divider.sequence = True
        for chunk in run.chunks:
            chunk.model.sequence_parts = run.experiment.parallel["tp"]
        run.gradients.partial[:] = run.divider.partial


def _rewritten(op: Op, t: int) -> Op:
    if op.kind == "all_reduce" and op.axis == "tp" and not op.name.startswith("loss"):
        return changed(op, name=f"{op.name}_scatter", kind="reduce_scatter")
    outside = op.module in ("norm", "residual") or op.name.endswith(("o_proj.db", "down_proj.db"))
    return split_bytes(op, t) if outside and not op.axis else op


_INPUTS = {"attention": ("attention.q_proj", "attention.q_a_proj"), "head": ("head.out",),
           "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.router")}  # fmt: skip
"""The first operator of each part that reads the whole sequence."""
_OUTPUTS = {"attention": ("attention.o_proj",), "mlp": ("mlp.down_proj", "mlp.combine"), "embed": ("embed.tokens",)}
"""The layers whose output is scattered: their gradient arrives in parts."""


def _gathered(ops: list[Op], before: dict[str, tuple[str, ...]], size: float, t: int, direction: str) -> list[Op]:
    """The operators with an all-gather before the first one of each part."""
    out: list[Op] = []
    done: set[str] = set()
    for op in ops:
        for label, names in before.items():
            if label not in done and not op.axis and op.name.startswith(names):
                done.add(label)
                out.append(Op(f"{label}.gather", "communication", "all_gather", direction, bytes=size, link_bytes=size,
                              ranks=t, axis="tp"))  # fmt: skip
        out.append(op)
    return out


def _regathers(b: Block, size: float, t: int) -> list[Op]:
    """The divided inputs of column-parallel layers, gathered again for their weight gradients."""
    found = []
    for label, readers in (("attention", "qkv"), ("mlp", ("gate", "up")), ("head", ())):
        layers = [f"{label}.{r}_proj" for r in readers] or ["head.out"]
        weights = {f"{layer}{tail}.dw" for layer in layers for tail in ("", ".lora_a")}
        if not any(o.name in weights for o in b.backward):
            continue
        beside = next((o.name for o in b.backward if o.name in {f"{layer}.dx" for layer in layers}), "")
        found.append(Op(f"{label}.regather", "communication", "all_gather", "backward", bytes=size, link_bytes=size,
                        ranks=t, axis="tp", behind=beside, role="regather"))  # fmt: skip
    return found
