"""A learned weight change that is no longer trained: stored as the change, sparse where most of it is zero."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ridgeline.nn.adapters.adapter import Adapter, dense
from ridgeline.nn.adapters.diff import DiffLinear
from ridgeline.nn.adapters.mask import MaskLinear

SPARSE = 0.1
"""Largest fraction of changed weights for which the change is stored and multiplied as a sparse matrix."""


class FixedDelta(Adapter):
    """y = base(x) + x Δᵀ with Δ [out, in]."""

    leaves: ClassVar[tuple[str, ...]] = ("change",)

    def __init__(self, base: nn.Module, change: Tensor) -> None:
        super().__init__(base)
        sparse = int(change.count_nonzero()) <= SPARSE * change.numel()
        self.register_buffer("change", change.to_sparse_csr() if sparse else change)

    change: Tensor

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output plus the product with the change."""
        rows = x.reshape(-1, x.shape[-1])
        return y + (self.change @ rows.t()).t().reshape(y.shape).to(y.dtype)

    def weight(self) -> Tensor:
        """W + Δ."""
        return dense(self.base) + self.change.to_dense()


def fixed(adapter: Adapter) -> Adapter:
    """The same adapter for inference: deterministic gates, masks applied."""
    if isinstance(adapter, (DiffLinear, MaskLinear)):
        with torch.no_grad():
            return FixedDelta(adapter.base, adapter.weight() - dense(adapter.base))
    return adapter
