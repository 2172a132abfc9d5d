"""Wanda: pruning by weights and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.techniques.pruning.pruner import Pruning, prune
from ridgeline.techniques.technique import Card

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site


class Wanda(Pruning):
    """In each row, set to zero the weights with the smallest product of magnitude and input norm; the others are
    unchanged."""

    card: ClassVar[Card] = Card(
        name="wanda",
        title="Wanda",
        paper="arXiv:2306.11695",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="far better than magnitude pruning without any update of the weights",
        tolerance=0.09,
        quality="layer error and perplexity below magnitude pruning's at the same sparsity",
        example={"pattern": "2:4"},
        runs_in=frozenset({"compress"}),
    )

    def compress(self, run: CompressBuild) -> None:
        """Score by the diagonal of H, which holds the inputs' squared norms."""
        run.wants.add("gram")
        run.at_site.append(self._prune)

    def _prune(self, site: Site) -> None:
        assert site.gram is not None
        norms = site.gram.diagonal().sqrt()
        for layer in site.layers:
            prune(layer, self.keep(layer.weight.abs() * norms, per_row=True))
