"""FP8 training: the layers' matrix multiplications in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique


class FP8(Technique):
    """Run the linear layers of the blocks in fp8, forward and backward, over 16-bit activations elsewhere."""

    card: ClassVar[Card] = Card(
        name="fp8",
        title="FP8 training",
        paper="arXiv:2209.05433",
        taxonomy="hardware/precision/fp8",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="GPT models up to 175B trained to the loss of 16-bit training with unchanged hyperparameters",
        tolerance=0.05,
        quality="training loss within 5 % of 16-bit training after the same tokens",
        requires=("mixed_precision",),
        runs=False,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 2

    def check(self, e: Experiment) -> None:
        """Needs 16-bit arithmetic around it, and a GPU that multiplies in fp8."""
        self.needs(e.plan.has("mixed_precision"), "the rest of the model runs in 16 bits, which is not on",
                   "add mixed_precision")  # fmt: skip
        device = e.cluster.device
        self.needs(device.kind != "gpu" or "fp8" in device.peak_flops, f"{device.name} has no fp8 arithmetic",
                   "use a device of the Hopper, Ada or later generations, or drop fp8")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Reprice the linear layers; operands are one byte wide, results two."""

        def lower(op: Op) -> Op:
            linear = op.kind == "gemm" and op.param.endswith(("_proj.weight", "_proj"))
            return replace(op, dtype="fp8", bytes=op.bytes * 2 / 3) if linear else op

        def each(b: Block) -> None:
            b.forward = [lower(op) for op in b.forward]
            b.backward = [lower(op) for op in b.backward]

        return g.each_block(each, layers_only=True)
