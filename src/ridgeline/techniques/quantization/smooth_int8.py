"""LLM.int8: weights and inputs in 8 bits, except for outlier inputs; optionally with SmoothQuant's migration."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import WeightOnly, in_int8
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import BlockJob, CompressBuild, Site


class SmoothInt8(WeightOnly):
    """Weights as int8 with a scale per row, inputs as int8 with a scale per token; inputs in which a value reaches the
    threshold are multiplied in full precision. With alpha, part of the inputs' range is first migrated into the
    weights, which does not change the model's function."""

    card: ClassVar[Card] = Card(
        name="smooth_int8",
        title="LLM.int8 with optional smoothing",
        paper="arXiv:2208.07339",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="half the memory of 16-bit weights, almost without loss",
        tolerance=0.02,
        quality="perplexity within 2 % of the unquantized model, also with outliers among the inputs",
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    captured: ClassVar[bool] = False

    bits: Literal[8] = 8
    """Bits per weight and per input."""
    group_size: Literal[0] = 0
    """Always the whole row: integer products sum over it before they are scaled."""
    symmetric: Literal[True] = True
    """Always true: integer products need no zero points."""
    expert_bits: None = None
    """Always as the others: integer products have 8 bits."""
    threshold: float = Field(default=6.0, ge=0)
    """Magnitude from which an input is computed in full precision; 0: never."""
    alpha: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the inputs' range that is migrated into the weights (SmoothQuant uses 0.5, with threshold=0); 0:
    none."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a search sees it as rtn with quantized inputs, which cost quality."""
        return []

    @property
    def own_format(self) -> bool:
        """Whether the threshold is used, which needs our own format."""
        return self.threshold > 0

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights; products run in int8 where the device supports it."""
        return in_int8(super().rewrite(g, e), e)

    def compress(self, run: CompressBuild) -> None:
        """Migrate ranges, then round."""
        if self.alpha:
            run.wants.add("peak")
            run.before_block.append(self._smooth)
        run.at_site.append(lambda site: self._round(run, site))

    def _smooth(self, job: BlockJob) -> None:
        """s = max|X|^α / max|W|^(1-α) for each input (arXiv:2211.10438, equation 4)."""
        import torch

        from ridgeline.runtime.solve.fold import fold, readers, unfoldable

        for site, peak in job.peaks.items():
            if why := unfoldable(job.block, site):
                job.notes[site] = f"not smoothed: {why}"
                continue
            largest = torch.stack([linear.weight.abs().amax(0) for linear in readers(job.block, site)]).amax(0)
            scale = peak.pow(self.alpha) / largest.clamp_min(1e-5).pow(1 - self.alpha)
            fold(job.block, site, torch.where(peak > 0, scale, 1.0).clamp_min(1e-5))

    def _round(self, run: CompressBuild, site: Site) -> None:
        from ridgeline.nn.quant.activation_quant import InputCode
        from ridgeline.runtime.compress_build import store_nearest

        store_nearest(site, run.affine(self.bits, self.group_size, self.symmetric))
        for layer in site.layers:
            layer.input = InputCode(self.bits, threshold=self.threshold)
