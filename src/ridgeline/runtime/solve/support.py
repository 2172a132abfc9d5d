"""Sparsity masks: which entries of a weight may be nonzero. Scores are [out, in]; the lowest are pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Support(Protocol):
    """A rule that is applied block by block of columns during a sweep, so that it sees the current weights."""

    @property
    def span(self) -> int:
        """Number of columns that are decided together; 0: a whole block at once; m for n:m."""

    def keep(self, scores: Tensor, columns: slice) -> Tensor:
        """Boolean mask, shaped as ``scores`` [columns, out] (transposed, as solvers work)."""


@dataclass(frozen=True)
class Unstructured:
    """Prunes the fraction ``sparsity`` of lowest scores in each block of columns, over all rows (SparseGPT's adaptive
    rows)."""

    sparsity: float
    span: int = 0

    def keep(self, scores: Tensor, columns: slice) -> Tensor:
        """Keeps all but exactly round(sparsity · entries) entries of the block."""
        return without_least(scores.reshape(1, -1), round(self.sparsity * scores.numel())).view(scores.shape)


@dataclass(frozen=True)
class NM:
    """Of every ``m`` consecutive inputs of a row at most ``m - n`` … : exactly ``n`` of ``m`` entries are zero."""

    n: int = 2
    m: int = 4

    @property
    def span(self) -> int:
        """Number of columns that are decided together."""
        return self.m

    def keep(self, scores: Tensor, columns: slice) -> Tensor:
        """The m - n largest of each row's group; ``scores`` is one group [m, out]."""
        return without_least(scores.t(), self.n).t()


class Given:
    """A mask that was decided earlier: bool [out, in]."""

    span = 0

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.t()

    def keep(self, scores: Tensor, columns: slice) -> Tensor:
        """The corresponding part of the mask."""
        return self._mask[columns]

    def permuted(self, orders: Sequence[Tensor]) -> Given:
        """The same for reordered columns; rows in as many equal parts as there are ``orders`` [in]."""
        parts = self._mask.reshape(len(self._mask), len(orders), -1)
        return Given(reordered(parts, orders).flatten(1).t())


def reordered(x: Tensor, orders: Sequence[Tensor]) -> Tensor:
    """``x`` [in, parts, …], each part in its own order [in]."""
    if len(orders) == 1:
        return x[orders[0]]
    return torch.stack([part[order] for part, order in zip(x.unbind(1), orders, strict=True)], 1)


def without_least(scores: Tensor, count: int) -> Tensor:
    """bool [rows, n]: all but the ``count`` smallest entries of each row, exactly ``count`` even among ties."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if count:
        keep.scatter_(1, scores.topk(count, dim=1, largest=False, sorted=False).indices, False)
    return keep
