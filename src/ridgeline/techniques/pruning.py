"""What one-shot pruners share: which entries go, in what pattern, and that the file stays as large."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Phase, Technique
from ridgeline.techniques.weight_only import PRUNE, widths

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.compression import Layer


class Pruning(Technique):
    """Entries of the blocks' linear layers (experts too, not the router) are set to zero, once, without training."""

    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = PRUNE

    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of each layer's weights that becomes zero, where ``pattern`` is unstructured."""
    pattern: str = Field(default="unstructured", pattern=r"^(unstructured|\d+:\d+)$")
    """unstructured, or N:M: N of every M consecutive inputs of a row become zero (2:4, 4:8)."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: zeros among dense weights make nothing smaller or faster."""
        return []

    @property
    def groups(self) -> tuple[int, int] | None:
        """(zeros, of how many) of an N:M pattern."""
        found = re.fullmatch(r"(\d+):(\d+)", self.pattern)
        return (int(found[1]), int(found[2])) if found else None

    def check(self, e: Experiment) -> None:
        """Patterns must fit the rows; one pruner at a time."""
        from ridgeline.techniques.registry import registry

        known = registry()
        others = [c.name for c in e.plan.calls if c.name != self.card.name and issubclass(known[c.name], Pruning)]
        self.needs(not others, f"{', '.join(others)} already decides which weights stay", "keep one of them")
        if self.groups is None:
            return
        n, m = self.groups
        self.needs(0 < n < m, f"pattern {self.pattern} leaves nothing to choose", "use N:M with 0 < N < M, such as 2:4")
        for name, (_, width) in widths(e).items():
            self.needs(width % m == 0, f"groups of {m} do not divide {name}'s input width {width}",
                       f"use N:M with a divisor of {width} for M, or pattern=unstructured")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Nothing: the weights are stored and multiplied densely, with zeros."""
        return g

    def keep(self, scores: Tensor, per_row: bool) -> Tensor:
        """bool as ``scores`` [out, in]: all but the least, compared within rows, or over the whole layer."""
        from ridgeline.runtime.solve.support import without_least

        if self.groups is not None:
            n, m = self.groups
            return without_least(scores.reshape(-1, m), n).view(scores.shape)
        rows = scores if per_row else scores.reshape(1, -1)
        return without_least(rows, round(self.sparsity * rows.shape[1])).view(scores.shape)


def prune(layer: Layer, keep: Tensor) -> None:
    """Set the entries outside ``keep`` to zero, and let what follows know."""
    layer.keep, layer.weight = keep, layer.weight * keep
