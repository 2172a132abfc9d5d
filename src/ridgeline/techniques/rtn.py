"""Round-to-nearest weight-only quantization (int8, int4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.weight_only import packed, shrunk

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.build import Build


class RTN(Technique):
    """Store the linear layers of the blocks as int8 or packed int4 codes with symmetric scales; dequantise per use."""

    card: ClassVar[Card] = Card(
        name="rtn",
        title="Round-to-nearest weight-only quantization",
        paper="arXiv:2206.01861",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"pretrain", "finetune", "generate", "serve"}),
        lossless=False,
        claim="int8 weights at the quality of fp16; 4x smaller than fp32 (baseline of every later method)",
        tolerance=0.02,
        quality="loss or perplexity within 2 % of the unquantised plan at 8 bits",
        requires=("lora",),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 0

    bits: Literal[4, 8] = 8
    """Bits of one weight."""
    group_size: int = Field(default=0, ge=0)
    """Weights that share a scale along the input dimension; 0: the whole row."""

    def check(self, e: Experiment) -> None:
        """Integer weights cannot train, and groups must divide the rows."""
        self.needs(
            not e.is_training or e.plan.has("lora"),
            f"an int{self.bits} base cannot be trained: rounding has no useful gradient",
            "add lora (--with lora), or use task generate",
        )
        for p in e.model.block_parameters(0):
            if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                k = p.shape[1]
                if self.group_size:
                    self.needs(k % self.group_size == 0, f"group_size {self.group_size} does not divide {p.name}'s"
                               f" input width {k}", f"use a divisor of {k}, or 0 for whole rows")  # fmt: skip
                self.needs(self.bits == 8 or k % 2 == 0, f"{p.name} has odd width {k}: int4 packs pairs", "use bits=8")

    def bytes_per_weight(self, k: int) -> float:
        """Stored bytes of one weight, its share of the fp32 scale included."""
        return self.bits / 8 + 4.0 / (self.group_size or k)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Weights shrink; every use first expands one weight matrix to the compute dtype."""

        if not e.is_training:
            return shrunk(g, e, self.bits, self.group_size, True)

        def quantise(b: Block) -> None:
            sizes: dict[str, float] = {}
            for p in b.params:
                if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                    p.bytes_per_element = self.bytes_per_weight(p.shape[1])
                    p.dtype = f"int{self.bits}"
                    p.trainable = False
                    sizes[p.name] = p.numel
            if not sizes:
                return
            for ops in (b.forward, b.backward):
                for op in [o for o in ops if o.kind == "gemm" and o.param in sizes and not o.name.endswith(".dw")]:
                    n = sizes[op.param]
                    expand = Op(f"{op.name}.dequantise", op.module, "cast", op.direction, 0, n * (self.bits / 8 + 4),
                                f"int{self.bits}", param=op.param)  # fmt: skip
                    ops.insert(ops.index(op), expand)
            largest = max(sizes.values()) * 4.0
            b.workspace = max(b.workspace, largest)
            b.backward_workspace = max(b.backward_workspace, largest)

        return g.each_block(quantise, layers_only=True)

    def build(self, run: Build) -> None:
        """Replace the linears of every block by integer codes; where nothing trains, by those of the fast kernels."""
        if not run.experiment.is_training:
            packed(run, self.card.name, self.bits, self.group_size, True, codes_dense=True)
            return
        from ridgeline.nn.quantised import IntLinear, replace_linears

        replace_linears(run.model, lambda linear: IntLinear(linear, self.bits, self.group_size))

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Codes expanded."""
        from ridgeline.nn.quantised import IntLinear, expanded

        return expanded(state, IntLinear)
