"""Round-to-nearest weight-only quantization (int8, int4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import WeightOnly, packed
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.build import Build
    from ridgeline.runtime.compress_build import CompressBuild, Site


class RTN(WeightOnly):
    """Store the linear layers of the blocks as integers with a scale per row or group, each weight rounded to nearest
    independently; dequantized at every use. Preserves the zeros of a pruned weight."""

    card: ClassVar[Card] = Card(
        name="rtn",
        title="Round-to-nearest weight-only quantization",
        paper="arXiv:2206.01861",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"pretrain", "finetune", "compress", "generate", "serve"}),
        validated=frozenset({"generate"}),
        lossless=False,
        claim="int8 weights at the quality of fp16; 4x smaller than fp32 (baseline of every later method)",
        tolerance=0.02,
        quality="loss or perplexity within 2 % of the unquantized plan at 8 bits",
        changes=frozenset({"experts"}),
        needs={"low_rank": "an integer base cannot be trained: rounding has no useful gradient"},
        encoder_decoders=True,
    )

    bits: int = Field(default=8, ge=2, le=8)
    """Bits per weight; 4 or 8 for the base of a training run."""
    group_size: int = Field(default=0, ge=0)
    """Weights that share a scale along the input dimension; 0: the whole row."""
    mse: bool = False
    """Shrink each group's range to minimize the error (not in training)."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Both bit widths."""
        return [cls(bits=4), cls(bits=8)]

    def check(self, e: Experiment) -> None:
        """Groups must divide the rows; a training base supports fewer formats."""
        super().check(e)
        if not e.is_training:
            return
        self.needs(self.bits in (4, 8), f"a training base is held in int4 or int8, not {self.bits} bits",
                   "use bits=4 or bits=8")  # fmt: skip
        self.needs(self.expert_bits is None, "a training base leaves experts as they are", "leave out expert_bits")
        self.needs(self.symmetric and not self.mse, "a training base is rounded symmetrically to the largest weight",
                   "use symmetric=true and mse=false")  # fmt: skip
        for p in e.model.block_parameters(0):
            if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                k = p.shape[1]
                self.needs(self.bits == 8 or k % 2 == 0, f"{p.name} has odd width {k}: int4 packs pairs", "use bits=8")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights; in training every use first dequantizes one weight matrix to the compute dtype."""
        if not e.is_training:
            return super().rewrite(g, e)

        def quantize(b: Block) -> None:
            sizes: dict[str, float] = {}
            for p in b.params:
                if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                    p.bytes_per_element = self.bits / 8 + 4.0 / (self.group_size or p.shape[1])
                    p.dtype = f"int{self.bits}"
                    p.trainable = False
                    sizes[p.name] = p.numel
            if not sizes:
                return
            for ops in (b.forward, b.backward):
                for op in [o for o in ops if o.kind == "gemm" and o.param in sizes and o.role != "weight_gradient"]:
                    n = sizes[op.param]
                    expand = Op(f"{op.name}.dequantize", op.module, "cast", op.direction, 0, n * (self.bits / 8 + 4),
                                f"int{self.bits}", param=op.param)  # fmt: skip
                    ops.insert(ops.index(op), expand)
            largest = max(sizes.values()) * 4.0
            b.workspace = max(b.workspace, largest)
            b.backward_workspace = max(b.backward_workspace, largest)

        return g.each_block(quantize, layers_only=True)

    def apply(self, run: Build) -> None:
        """Replace the linears of every block by quantized ones; where nothing trains, in the format of the fast
        kernels."""
        if not run.experiment.is_training:
            packed(run, self, codes_dense=True, mse=self.mse)
            return
        from ridgeline.nn.quant.quantized import IntLinear, replace_linears

        replace_linears(run.model, lambda linear: IntLinear(linear, self.bits, self.group_size))

    def compress(self, run: CompressBuild) -> None:
        """Round the layers of a site to nearest."""
        from ridgeline.runtime.compress_build import store_nearest

        def round_site(site: Site) -> None:
            store_nearest(site, run.affine(self.bits_of(site.name), self.group_size, self.symmetric, self.mse))

        run.at_site.append(round_site)

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Dequantize the weights."""
        from ridgeline.nn.quant.quantized import IntLinear, expanded

        return expanded(state, IntLinear)
