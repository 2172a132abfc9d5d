"""FPTQ: 4-bit weights with 8-bit inputs; how a site's inputs are quantized depends on their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.gptq import GPTQ
from ridgeline.techniques.quantization.weight_only import WeightOnly, in_int8
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.nn.quant.activation_quant import InputCode
    from ridgeline.runtime.compress_build import BlockJob, CompressBuild, Site

INPUT_BITS = 8


class FPTQ(WeightOnly):
    """Weights in 4 bits; inputs in int8. The largest calibrated input of a site decides: small ranges get one static
    scale; medium ones too, after logarithmic equalization of their channels, which is folded into what produces them;
    large ones, and those into whose producer nothing can be folded, get a scale per token at run time."""

    card: ClassVar[Card] = Card(
        name="fptq",
        title="FPTQ",
        paper="arXiv:2308.15987",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="W4A8 LLaMA-7B and 13B at 73.38 and 76.81 on common-sense QA",
        tolerance=0.05,
        quality="layer error and perplexity below 4-bit weights with one static scale per input",
        example={"bits": 8, "group_size": 32},
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    low: float = Field(default=15.0, ge=0)
    """Largest magnitude up to which a site's inputs get one static scale without equalization."""
    high: float = Field(default=150.0, ge=0)
    """Magnitude from which they get a scale per token; between the two they are equalized."""
    solver: Literal["rtn", "gptq"] = "rtn"
    """How weights are rounded."""

    def check(self, e: Experiment) -> None:
        """``low`` must not exceed ``high``."""
        super().check(e)
        self.needs(self.low <= self.high, f"low={self.low:g} is above high={self.high:g}", "use low <= high")

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a search sees it as gptq with quantized inputs, which cost quality."""
        return []

    def groups_experts(self, e: Experiment) -> bool:
        """Inputs are quantized expert by expert."""
        return False

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights; products run in int8 where the device supports it."""
        return in_int8(super().rewrite(g, e), e)

    def compress(self, run: CompressBuild) -> None:
        """Decide and fold before each block, then round its weights."""
        run.wants.add("peak")
        decided: dict[str, InputCode] = {}
        run.before_block.append(lambda job: self._decide(job, decided))
        round_weights = self._solver(run)

        def solve(site: Site) -> None:
            round_weights(site)
            code = decided.get(site.name, _per_token())  # experts have no calibrated peak
            for layer in site.layers:
                layer.input = code

        run.at_site.append(solve)

    def _solver(self, run: CompressBuild) -> Callable[[Site], None]:
        if self.solver == "gptq":
            run.wants.add("gram")
            gptq = GPTQ(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric,
                        expert_bits=self.expert_bits)  # fmt: skip
            return lambda site: gptq.solve(run, site)
        from ridgeline.runtime.compress_build import store_nearest

        return lambda site: store_nearest(site, run.affine(self.bits_of(site.name), self.group_size, self.symmetric))

    def _decide(self, job: BlockJob, decided: dict[str, InputCode]) -> None:
        from ridgeline.nn.quant.activation_quant import InputCode
        from ridgeline.runtime.solve.fold import fold, unfoldable

        decided.clear()
        top = 2 ** (INPUT_BITS - 1) - 1
        for site, peak in job.peaks.items():
            largest, why = float(peak.max()), unfoldable(job.block, site)
            if largest <= self.low:
                code, how = InputCode(INPUT_BITS, max(largest, 1e-5) / top), "static"
            elif largest >= self.high or why:
                code, how = _per_token(), f"per token: {why}" if largest < self.high else "per token"
            else:
                scale = equalizer(peak)
                fold(job.block, site, scale)
                code, how = InputCode(INPUT_BITS, float((peak / scale).max()) / top), "equalized, static"
            decided[f"layers.{job.index}.{site}"] = code
            job.notes[site] = {"largest": largest, "inputs": how}


def equalizer(peak: Tensor) -> Tensor:
    """Logarithmic activation equalization: s_j = max|X_j| / log2(2 + max|X_j|) (section 3.3 of the paper), [in]; 1 for
    inputs that are never active."""
    import torch

    return torch.where(peak > 0, peak / torch.log2(2 + peak), 1.0).clamp_min(1e-5)


def _per_token() -> InputCode:
    from ridgeline.nn.quant.activation_quant import InputCode

    return InputCode(INPUT_BITS)
