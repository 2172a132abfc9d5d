"""AWQ: activation-aware weight quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import EXPERTS, WeightOnly
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.compress_build import BlockJob, CompressBuild
    from ridgeline.runtime.solve.grid import Grid


class AWQ(WeightOnly):
    """Before rounding to nearest, scale up the weights of inputs whose mean magnitude is large, by a power of that mean
    that is searched for each site; the inverse is folded into what produces the input. Experts of mixtures are rounded
    without scaling."""

    card: ClassVar[Card] = Card(
        name="awq",
        title="Activation-aware weight quantization (AWQ)",
        paper="arXiv:2306.00978",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="4-bit weights with little loss, without backpropagation or reconstruction of weights",
        tolerance=0.05,
        quality="layer error at most round-to-nearest's at the same bits",
        example={"bits": 8, "group_size": 32},
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    symmetric: bool = False
    """Whether the range is centered on zero; False: a zero point per group is stored too."""
    steps: int = Field(default=20, ge=1)
    """Number of powers that are tried: 0, 1/steps, …, 1."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: gptq has the same storage format."""
        return []

    def compress(self, run: CompressBuild) -> None:
        """Search and fold before each block, then round its weights."""
        from ridgeline.runtime.compress_build import store_nearest

        grid = run.affine(self.bits, self.group_size, self.symmetric)
        for_experts = run.affine(self.expert_bits or self.bits, self.group_size, self.symmetric)
        run.before_block.append(lambda job: self._fold(job, grid))
        run.at_site.append(lambda site: store_nearest(site, for_experts if EXPERTS in site.name else grid))

    def _fold(self, job: BlockJob, grid: Grid) -> None:
        import torch

        from ridgeline.runtime.solve.fold import fold, readers, unfoldable
        from ridgeline.runtime.solve.statistics import Gram

        grams: dict[str, Gram] = {}
        sums: dict[str, Tensor] = {}

        def visit(site: str, x: Tensor) -> None:
            if site not in grams:
                grams[site], sums[site] = Gram(x.shape[-1]), torch.zeros(x.shape[-1])
            grams[site].add(x)
            sums[site] += x.abs().reshape(-1, x.shape[-1]).sum(0)

        job.observe(visit)
        for site, gram in grams.items():
            if why := unfoldable(job.block, site):
                job.notes[site] = f"not scaled: {why}"
                continue
            weight = torch.cat([linear.weight for linear in readers(job.block, site)])
            power, scale = self.search(weight, gram.value, sums[site] / gram.rows, grid)
            fold(job.block, site, scale)
            job.notes[site] = {"power": power}

    def search(self, weight: Tensor, gram: Tensor, mean: Tensor, grid: Grid) -> tuple[float, Tensor]:
        """(the power, the scales [in]) with the least layer error for ``weight`` [out, in] under H, from mean |x|
        [in]."""
        import torch

        from ridgeline.runtime.solve.grid import nearest
        from ridgeline.runtime.solve.sweep import relative_error

        best, found = float("inf"), (0.0, torch.ones_like(mean))
        for i in range(self.steps + 1):
            power = i / self.steps
            scale = mean.pow(power).clamp_min(1e-4)
            scale = scale / (scale.max() * scale.min()).sqrt()
            scaled = weight * scale
            error = relative_error(weight, nearest(scaled, grid.fit(scaled)) / scale, gram)
            if error < best:
                best, found = error, (power, scale)
        return found
