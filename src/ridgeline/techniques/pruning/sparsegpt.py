"""SparseGPT: one-shot pruning with second-order information."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.techniques.pruning.pruner import Pruning, prune
from ridgeline.techniques.technique import Card

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site
    from ridgeline.runtime.solve.support import Support


class SparseGPT(Pruning):
    """Drop weights column by column, each time compensating for the error in the remaining columns, using the second
    moments of the layer's inputs. A quantizer that follows (gptq, quantease, rtn) preserves the zeros."""

    card: ClassVar[Card] = Card(
        name="sparsegpt",
        title="SparseGPT",
        paper="arXiv:2301.00774",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="50-60 % sparsity in one shot with little loss; a 175B model in under 4.5 hours",
        tolerance=0.05,
        quality="layer error and perplexity below Wanda's and magnitude pruning's at the same sparsity",
        example={"pattern": "2:4"},
        runs_in=frozenset({"compress"}),
    )

    damp: float = Field(default=0.01, gt=0)
    """Fraction of the mean diagonal that is added to H; increased tenfold, up to twice, where H is singular."""
    block: int = Field(default=128, ge=1)
    """Inputs whose weights are compared with each other, over all rows of a layer."""

    def compress(self, run: CompressBuild) -> None:
        """Solve layer by layer, so that each has exactly the requested sparsity."""
        run.wants.add("gram")
        run.at_site.append(self._prune)

    def support(self) -> tuple[Support, int]:
        """The selection rule, and the block of columns to which it is applied (whole groups of an N:M pattern)."""
        from ridgeline.runtime.solve.support import NM, Unstructured

        if self.groups is None:
            return Unstructured(self.sparsity), self.block
        n, m = self.groups
        return NM(n, m), max(1, self.block // m) * m

    def _prune(self, site: Site) -> None:
        from ridgeline.runtime.solve.sweep import sweep

        assert site.gram is not None
        support, block = self.support()
        for layer in site.layers:
            solved = sweep(layer.weight, site.gram, support=support, damp=self.damp, block=block)
            assert solved.keep is not None
            layer.weight = solved.weight
            prune(layer, solved.keep)
            layer.notes.update(solved.notes)
