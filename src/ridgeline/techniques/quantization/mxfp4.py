"""MXFP4: 4-bit floating-point weights in blocks of 32 that share a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.scheduling import OWN, engine_name
from ridgeline.techniques.quantization.weight_only import narrow
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.nn.quant.packed import Packed
    from ridgeline.runtime.build import Build

BITS = 4 + 8 / 32
"""Bits per weight: 4, plus the weight's part of the block's 8-bit scale."""


class MXFP4(Technique):
    """Store weights as E2M1 codes in blocks of 32 with a power-of-two scale; kernels dequantize them in registers.

    This is the format of gpt-oss's experts. Products run in 16 bits, so only memory traffic shrinks; Blackwell
    multiplies 4-bit weights with 8-bit activations at its fp8 rate, which Ridgeline's own engine does not use.
    """

    card: ClassVar[Card] = Card(
        name="mxfp4",
        title="Microscaling 4-bit weights",
        paper="arXiv:2310.10537",
        taxonomy="inference/compression/quantization",
        tasks=frozenset({"generate", "serve"}),
        lossless=False,
        validated=frozenset({"generate", "serve"}),
        claim="4.25 bits per weight; gpt-oss-120b fits one 80 GB device (arXiv:2508.10925)",
        tolerance=0.12,
        quality="logits within the rounding error of normally distributed weights, 11.6 % of their root mean square; a"
        " checkpoint that has the format loses nothing",
        needs_model={"num_experts": 4, "experts_per_token": 2},
        changes=frozenset({"weights", "experts"}),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 2
    """Before anything divides the weights; fp8 leaves the weights that it stored alone."""

    layers: Literal["experts", "all"] = "experts"
    """Which linear layers: the experts of a mixture, or every projection of the blocks."""

    def check(self, e: Experiment) -> None:
        """There must be weights to quantize."""
        self.needs(self.layers == "all" or e.model.num_experts > 0, f"{e.model.name} has no experts",
                   "use mxfp4:layers=all")  # fmt: skip
        part = _part(self.layers)
        for p in e.model.parameters():
            if part in p.name and not p.name.endswith("bias"):
                self.needs(p.shape[-1] % 32 == 0, f"{p.name} has {p.shape[-1]} inputs, and blocks have 32",
                           "leave mxfp4 out for this model")  # fmt: skip

    def apply(self, run: Build) -> None:
        """A checkpoint's blocks are read as they are; dense weights are rounded to nearest."""
        from ridgeline.nn.quant import mxfp4
        from ridgeline.nn.quant.packed_model import pack_layers, packed_layers

        if packed_layers(run.model):
            return
        experts = self.layers == "experts"

        def code(name: str, expert: int | None) -> tuple[Packed, None] | None:
            if experts and expert is None:
                return None
            weight = run.model.get_parameter(name).detach()
            return mxfp4.quantized(weight if expert is None else weight[expert]), None

        pack_layers(run.model, code, next(run.model.parameters()).device)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The chosen weights take 4.25 bits; everything else is unchanged."""
        part = _part(self.layers)
        own = engine_name(getattr(e.workload, "engine", ""), e.cluster.device.name) == OWN
        native = e.cluster.device.architecture == "blackwell" and not own
        return g.each_block(lambda b: _shrink(b, part, native), layers_only=True)


def _part(layers: str) -> str:
    return ".experts." if layers == "experts" else "_proj"


def _shrink(b: Block, part: str, native: bool) -> None:
    wide = {p.name: p.bytes_per_element for p in b.params if part in p.name and not p.name.endswith("bias")}
    for p in b.params:
        if p.name in wide:
            p.bytes_per_element, p.dtype, p.trainable = BITS / 8, "int4", False
    b.forward = [_narrow(o, wide[o.param], native) if o.kind == "gemm" and o.param in wide else o for o in b.forward]


def _narrow(op: Op, width: float, native: bool) -> Op:
    low = changed(narrow(op, BITS / 8, width, "int4"), kernel="mxfp4")
    if not native:
        return low
    rows, _, inner = op.shape
    return changed(low, bytes=low.bytes - rows * inner * (width - 1.0), dtype="fp8", weight_dtype="", kernel="")
