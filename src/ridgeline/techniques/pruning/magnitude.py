"""Magnitude pruning: remove the smallest weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.techniques.pruning.pruner import Pruning, prune
from ridgeline.techniques.technique import Card

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site


class Magnitude(Pruning):
    """Set the smallest weights of each layer to zero. Needs no data; the baseline for the other pruners."""

    card: ClassVar[Card] = Card(
        name="magnitude",
        title="Magnitude pruning",
        paper="arXiv:1506.02626",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="the baseline of every later pruning method",
        tolerance=0.09,
        quality="layer error and perplexity above Wanda's at the same sparsity",
        example={"pattern": "2:4"},
        runs_in=frozenset({"compress"}),
    )

    def compress(self, run: CompressBuild) -> None:
        """Prune layer by layer."""
        run.at_site.append(self._prune)

    def _prune(self, site: Site) -> None:
        for layer in site.layers:
            prune(layer, self.keep(layer.weight.abs(), per_row=False))
