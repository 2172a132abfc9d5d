"""QLoRA: low-rank adapters over a 4-bit NormalFloat base."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A code of 4 bits, its block's 8-bit scale (64 weights), and that scale's fp32 scale (256 blocks): section 3."""


class QLoRA(Technique):
    """Store the frozen linear layers in NF4 with doubly quantised scales, and expand each matrix at every use."""

    card: ClassVar[Card] = Card(
        name="qlora",
        title="QLoRA",
        paper="arXiv:2305.14314",
        taxonomy="training/finetune/qlora",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="a 65B model fine-tuned on one 48 GB GPU",
        tolerance=0.05,
        quality="loss within 5 % of LoRA on the unquantised base",
        requires=("lora",),
        runs=False,
    )
    phase: ClassVar[Phase] = "adapt"

    def check(self, e: Experiment) -> None:
        """A 4-bit base cannot train by itself, and is quantised once."""
        self.needs(e.plan.has("lora"), "a 4-bit base cannot be trained: rounding has no useful gradient",
                   "add lora (--with lora)")  # fmt: skip
        self.needs(not e.plan.has("rtn"), "rtn already stores the base as integers", "keep one of qlora and rtn")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Weights shrink; every use first expands one weight matrix."""

        def quantise(b: Block) -> None:
            sizes = {}
            for p in b.params:
                if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                    p.bytes_per_element, p.dtype, p.trainable = _BYTES, "nf4", False
                    sizes[p.name] = p.numel
            for ops in (b.forward, b.backward):
                for op in [o for o in ops if o.kind == "gemm" and o.param in sizes and not o.name.endswith(".dw")]:
                    moved = sizes[op.param] * (_BYTES + 4)
                    expand = Op(f"{op.name}.dequantise", op.module, "cast", op.direction, 0, moved, "int4",
                                param=op.param)  # fmt: skip
                    ops.insert(ops.index(op), expand)
            largest = max(sizes.values(), default=0.0) * 4.0
            b.workspace = max(b.workspace, largest)
            b.backward_workspace = max(b.backward_workspace, largest)

        return g.each_block(quantise, layers_only=True)
