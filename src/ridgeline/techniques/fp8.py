"""FP8 inference: 8-bit floating-point weights and activations in the linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.train.build import Build


class FP8(Technique):
    """Store the blocks' linear layers as fp8 (E4M3) and multiply them with fp8 activations, scaled as they come.

    A device without fp8 units keeps the small weights and multiplies in 16 bits.
    """

    card: ClassVar[Card] = Card(
        name="fp8",
        title="FP8 weights and activations",
        paper="arXiv:2209.05433",
        taxonomy="inference/compression/quantization",
        tasks=frozenset({"generate", "serve"}),
        lossless=False,
        claim="matches 16-bit results over CNNs, RNNs and Transformers without changing hyper-parameters",
        tolerance=0.02,
        quality="perplexity within 2 % of the 16-bit model",
        runs=False,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1

    def check(self, e: Experiment) -> None:
        """One weight format at a time."""
        self.needs(not e.plan.has("rtn"), "rtn already stores the weights as integers", "keep one of them")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Weights and inputs of the projections take one byte; products run at the fp8 rate where there is one."""
        compute = "fp8" if "fp8" in e.cluster.device.peak_flops else ""
        return g.each_block(lambda b: _shrink(b, compute), layers_only=True)

    def build(self, run: Build) -> None:
        """Predicted only."""
        self.needs(False, "can be predicted, not yet run", "use `ridgeline predict`, or rtn, which runs")


def _shrink(b: Block, compute: str) -> None:
    wide = {p.name: p.bytes_per_element for p in b.params if "_proj" in p.name and not p.name.endswith(".bias")}
    for p in b.params:
        if p.name in wide:
            p.bytes_per_element, p.dtype, p.trainable = 1.0, "fp8", False
    b.forward = [_narrow(o, wide[o.param], compute) if o.kind == "gemm" and o.param in wide else o for o in b.forward]


def _narrow(op: Op, width: float, compute: str) -> Op:
    rows, out, inner = op.shape[-3:]
    saved = op.bytes - rows * out * width  # operands; the result stays wide
    operands = saved / width if compute else saved - (saved - rows * inner * width) * (1 - 1 / width)
    return replace(op, bytes=rows * out * width + operands, dtype=compute or op.dtype)
