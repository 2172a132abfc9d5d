"""FineQuant: weight-only quantization with an individual group size for every matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import WeightOnly
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.compress_build import CompressBuild, Site


class FineQuant(WeightOnly):
    """Start with one scale per row and halve the group as long as that shrinks the ranges considerably, which indicates
    outliers; round to nearest. Needs no data. Layers that engines fuse get the same group size."""

    card: ClassVar[Card] = Card(
        name="finequant",
        title="FineQuant",
        paper="arXiv:2308.09723",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="up to 3.65x the throughput of OPT-175B",
        tolerance=0.05,
        quality="perplexity at most that of round-to-nearest with whole rows, in fewer bytes than small groups take",
        example={"bits": 8, "group_size": 32},
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    group_size: int = Field(default=64, ge=1)
    """Smallest group of inputs that share a scale. Predictions use it for all matrices."""
    alpha: float = Field(default=0.9, gt=0, lt=1)
    """Halve the group while the mean range falls below this fraction of its previous value."""
    mse: bool = False
    """Shrink each group's range to minimize the error before rounding."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: gptq has the same storage format."""
        return []

    def check(self, e: Experiment) -> None:
        """Without weights, assume that rows are divided into the smallest groups."""
        if e.task == "compress":
            self.check_head(e)
        else:
            super().check(e)

    def groups_experts(self, e: Experiment) -> bool:
        """Every expert has group sizes of its own."""
        return False

    def compress(self, run: CompressBuild) -> None:
        """Choose, then round."""
        run.at_site.append(lambda site: self._round(run, site))

    def _round(self, run: CompressBuild, site: Site) -> None:
        from ridgeline.runtime.compress_build import store_nearest

        size = self.chosen(site.together())
        store_nearest(site, run.affine(self.bits_of(site.name), size, self.symmetric, self.mse), group_size=size)

    def chosen(self, weight: Tensor) -> int:
        """The group size for ``weight`` [out, in]: always ``in`` divided by a power of two."""
        size = weight.shape[1]
        mean = self._range(weight, size)
        while size % 2 == 0 and size // 2 >= self.group_size:
            halved = self._range(weight, size // 2)
            if halved >= self.alpha * mean:
                break
            size, mean = size // 2, halved
        return size

    def _range(self, weight: Tensor, size: int) -> float:
        """Mean range covered by the scales, over rows and groups."""
        grouped = weight.reshape(len(weight), -1, size)
        if self.symmetric:
            return float(grouped.abs().amax(-1).mean())
        return float((grouped.amax(-1).clamp_min(0) - grouped.amin(-1).clamp_max(0)).mean())
