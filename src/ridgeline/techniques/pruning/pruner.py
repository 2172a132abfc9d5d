"""What one-shot pruners share: which entries go, in what pattern, and that the file stays as large."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parts import Part
from ridgeline.techniques.quantization.weight_only import PRUNE, narrow, widths
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.compress_build import LinearLayer


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
        """None: what it costs in quality is not predicted, so a search would always take 2:4 on sparse cores."""
        return []

    @property
    def groups(self) -> tuple[int, int] | None:
        """(zeros, of how many) of an N:M pattern."""
        found = re.fullmatch(r"(\d+):(\d+)", self.pattern)
        return (int(found[1]), int(found[2])) if found else None

    def owns(self) -> frozenset[Part]:
        """One pruner at a time."""
        return self.card.owns | {"zeros"}

    def check(self, e: Experiment) -> None:
        """Patterns must fit the rows."""
        if self.groups is None:
            return
        n, m = self.groups
        self.needs(0 < n < m, f"pattern {self.pattern} leaves nothing to choose", "use N:M with 0 < N < M, such as 2:4")
        for name, (_, width) in widths(e).items():
            self.needs(width % m == 0, f"groups of {m} do not divide {name}'s input width {width}",
                       f"use N:M with a divisor of {width} for M, or pattern=unstructured")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """2:4 in 16 bits on sparse tensor cores: half the products, half the weights and two bits for the place of each
        that stays (arXiv:2104.08378). Any other zeros are stored and multiplied as dense weights are."""
        dense = has(e, "weights") or DTYPE_BYTES[e.dtype] != 2
        if self.groups != (2, 4) or dense or not e.cluster.device.sparse_cores:
            return g
        return g.each_block(_on_sparse_cores, layers_only=True)

    def keep(self, scores: Tensor, per_row: bool) -> Tensor:
        """bool as ``scores`` [out, in]: all but the least, compared within rows, or over the whole layer."""
        from ridgeline.runtime.solve.support import without_least

        if self.groups is not None:
            n, m = self.groups
            return without_least(scores.reshape(-1, m), n).view(scores.shape)
        rows = scores if per_row else scores.reshape(1, -1)
        return without_least(rows, round(self.sparsity * rows.shape[1])).view(scores.shape)


SIDE = 64
"""What both sides of a weight must be multiples of for the kernels of sparse cores."""
_KEPT = 0.5 + 0.5 * 2 / 16
"""Bytes of a 16-bit 2:4 weight over those of a dense one."""


def _on_sparse_cores(b: Block) -> None:
    fits = {p.name for p in b.params
            if p.name.endswith("_proj.weight") and not any(side % SIDE for side in p.shape)}  # fmt: skip
    for p in b.params:
        p.bytes_per_element *= _KEPT if p.name in fits else 1.0

    def skip(op: Op) -> Op:
        if op.kind != "gemm" or op.param not in fits:
            return op
        return changed(narrow(op, 2 * _KEPT, 2.0, ""), flops=op.flops / 2, sparse=True)

    b.forward = [skip(op) for op in b.forward]


def prune(layer: LinearLayer, keep: Tensor) -> None:
    """Set the entries outside ``keep`` to zero, and let what follows know."""
    layer.keep, layer.weight = keep, layer.weight * keep
