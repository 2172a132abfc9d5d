"""Shared code of the one-shot pruners: which entries are removed, in what pattern, and the size of the result."""

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
    """Set entries of the blocks' linear layers (including experts, not the router) to zero, once, without training."""

    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = PRUNE

    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Fraction of each layer's weights set to zero, where ``pattern`` is unstructured."""
    pattern: str = Field(default="unstructured", pattern=r"^(unstructured|\d+:\d+)$")
    """unstructured, or N:M: N of every M consecutive inputs of a row are set to zero (2:4, 4:8)."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: the loss in quality is not predicted, so a search would always choose 2:4 on sparse tensor cores."""
        return []

    @property
    def groups(self) -> tuple[int, int] | None:
        """(zeros, group size) of an N:M pattern."""
        found = re.fullmatch(r"(\d+):(\d+)", self.pattern)
        return (int(found[1]), int(found[2])) if found else None

    def owns(self) -> frozenset[Part]:
        """One pruner at a time."""
        return self.card.owns | {"zeros"}

    def check(self, e: Experiment) -> None:
        """Patterns must divide the rows."""
        if self.groups is None:
            return
        n, m = self.groups
        self.needs(0 < n < m, f"pattern {self.pattern} leaves nothing to choose", "use N:M with 0 < N < M, such as 2:4")
        for name, (_, width) in widths(e).items():
            self.needs(width % m == 0, f"groups of {m} do not divide {name}'s input width {width}",
                       f"use N:M with a divisor of {width} for M, or pattern=unstructured")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """2:4 in 16 bits on sparse tensor cores: half the products, half the weights and a two-bit index for each that
        remains (arXiv:2104.08378). Any other zeros are stored and multiplied like dense weights."""
        dense = has(e, "weights") or DTYPE_BYTES[e.dtype] != 2
        if self.groups != (2, 4) or dense or not e.cluster.device.sparse_cores:
            return g
        return g.each_block(_on_sparse_cores, layers_only=True)

    def keep(self, scores: Tensor, per_row: bool) -> Tensor:
        """Boolean mask shaped as ``scores`` [out, in]: all but the lowest scores, compared within rows or over the
        whole layer."""
        from ridgeline.runtime.solve.support import without_least

        if self.groups is not None:
            n, m = self.groups
            return without_least(scores.reshape(-1, m), n).view(scores.shape)
        rows = scores if per_row else scores.reshape(1, -1)
        return without_least(rows, round(self.sparsity * rows.shape[1])).view(scores.shape)


SIDE = 64
"""Both dimensions of a weight must be multiples of this for the sparse tensor cores' kernels."""
_KEPT = 0.5 + 0.5 * 2 / 16
"""Bytes of a 16-bit 2:4 weight relative to a dense one."""


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
    """Set the entries outside ``keep`` to zero, and record the mask for later techniques."""
    layer.keep, layer.weight = keep, layer.weight * keep
