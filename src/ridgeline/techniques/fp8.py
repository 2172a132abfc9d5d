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
        """Reprice the linear layers: operands one byte wide, results two; both operands are quantised before."""

        def each(b: Block) -> None:
            b.forward = [new for op in b.forward for new in _lowered(op)]
            b.backward = [new for op in b.backward for new in _lowered(op)]

        return g.each_block(each, layers_only=True)


def _lowered(op: Op) -> list[Op]:
    """The operator in fp8 behind the quantisation of what is new to it: inputs and weights in forward, the gradient of
    the result in backward (which both backward products read)."""
    if op.kind != "gemm" or not op.param.endswith(("_proj.weight", "_proj")):
        return [op]
    m, n, k = op.shape
    low = replace(op, dtype="fp8", bytes=op.bytes * 2 / 3)
    new = {"dx": m * k, "dw": 0}.get(op.name.rpartition(".")[2], m * k + n * k * op.experts)
    if not new:
        return [low]
    quantise = Op(
        f"{op.name}.quantise", op.module, "quantise", op.direction, 0, 3.0 * new, "fp8", recompute=op.recompute
    )
    return [quantise, low]
