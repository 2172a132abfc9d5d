"""FP8: the layers' matrix multiplications in 8-bit floating point, in training and inference."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique


class FP8(Technique):
    """Run the linear layers of the blocks in fp8, over 16-bit activations elsewhere; inference also stores them so.

    At inference a device without fp8 units keeps the small weights and multiplies in 16 bits.
    """

    card: ClassVar[Card] = Card(
        name="fp8",
        title="FP8 linear layers",
        paper="arXiv:2209.05433",
        taxonomy="hardware/precision/fp8",
        tasks=frozenset({"pretrain", "finetune", "generate", "serve"}),
        lossless=False,
        claim="GPT models up to 175B trained to the loss of 16-bit training with unchanged hyperparameters",
        tolerance=0.05,
        quality="training loss within 5 % of 16-bit training after the same tokens; perplexity within 2 %",
        requires=("mixed_precision",),
        runs=False,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 2

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Only where the device multiplies in fp8: elsewhere it is emulated, or a way to store weights."""
        return [cls()] if "fp8" in e.cluster.device.peak_flops else []

    def check(self, e: Experiment) -> None:
        """Training needs 16-bit arithmetic around it and a GPU that multiplies in fp8; inference one weight format."""
        if not e.is_training:
            self.needs(not e.plan.has("rtn"), "rtn already stores the weights as integers", "keep one of them")
            return
        self.needs(e.plan.has("mixed_precision"), "the rest of the model runs in 16 bits, which is not on",
                   "add mixed_precision")  # fmt: skip
        device = e.cluster.device
        self.needs(device.kind != "gpu" or "fp8" in device.peak_flops, f"{device.name} has no fp8 arithmetic",
                   "use a device of the Hopper, Ada or later generations, or drop fp8")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Reprice the linear layers: operands one byte wide, results two; in training both are quantised before."""
        if e.is_training:
            return g.each_block(_lower, layers_only=True)
        compute = "fp8" if "fp8" in e.cluster.device.peak_flops else ""
        return g.each_block(lambda b: _store(b, compute), layers_only=True)


def _linear(op: Op) -> bool:
    return op.kind == "gemm" and op.param.endswith(("_proj.weight", "_proj"))


def _lower(b: Block) -> None:
    """Training: products in fp8 over weights that stay wide."""
    b.forward = [new for op in b.forward for new in _lowered(op)]
    b.backward = [new for op in b.backward for new in _lowered(op)]


def _lowered(op: Op) -> list[Op]:
    """The operator in fp8 behind the quantisation of what is new to it: inputs and weights in forward, the gradient of
    the result in backward (which both backward products read)."""
    if not _linear(op):
        return [op]
    m, n, k = op.shape
    low = changed(op, dtype="fp8", bytes=op.bytes * 2 / 3)
    new = {"dx": m * k, "dw": 0}.get(op.name.rpartition(".")[2], m * k + n * k * op.experts)
    if not new:
        return [low]
    moved = 3.0 * new  # two bytes read, one written
    quantise = Op(f"{op.name}.quantise", op.module, "quantise", op.direction, 0, moved, "fp8", recompute=op.recompute)
    return [quantise, low]


def _store(b: Block, compute: str) -> None:
    """Inference: weights of one byte, unless another technique already stores fewer."""
    wide = {p.name: p.bytes_per_element for p in b.params
            if p.name.endswith(("_proj.weight", "_proj")) and p.bytes_per_element > 1}  # fmt: skip
    for p in b.params:
        if p.name in wide:
            p.bytes_per_element, p.dtype, p.trainable = 1.0, "fp8", False
    ops: list[Op] = []
    for o in b.forward:
        if _linear(o) and o.param in wide:
            if compute and not o.name.endswith(("k_proj", "v_proj", "up_proj")):  # they share another's input
                elements = float(o.shape[-3] * o.shape[-1])
                ops.append(Op(f"{o.name}.quantise", o.module, "quantise", bytes=3 * elements, dtype=o.dtype))
            o = _narrow(o, wide[o.param], compute)
        ops.append(o)
    b.forward = ops


def _narrow(op: Op, width: float, compute: str) -> Op:
    rows, out, inner = op.shape[-3:]
    operands = op.bytes - rows * out * width  # the result stays wide
    inputs = 0.0 if compute else rows * inner * width  # without fp8 units only the weights are narrow
    return changed(
        op,
        bytes=rows * out * width + inputs + (operands - inputs) / width,
        dtype=compute or op.dtype,
        weight_dtype="fp8",
    )
