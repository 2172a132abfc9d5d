"""Value grids: the values that a weight may take. A grid fits its parameters to a weight, then snaps columns of it.

Solvers work on Wᵀ, so that a column of W is contiguous; ``snap`` is given a column index and writes in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.nn.quant.packed import Packed, PackedOutliers, Stored
from ridgeline.nn.quant.ternary import Ternary as Code


class Fitted(Protocol):
    """A grid with parameters for one weight [out, in]."""

    @property
    def whole_rows(self) -> bool:
        """Whether a row's values are the same in all its columns."""

    def snap(self, x: Tensor, column: int, out: Tensor) -> None:
        """Write to ``out`` the grid values nearest to ``x`` [out] for this column of W."""

    def pack(self, weight: Tensor, outliers: PackedOutliers | None = None) -> Stored | None:
        """The stored form of a weight [out, in] that is on the grid; None if the grid has none."""


class Grid(Protocol):
    """A kind of value grid."""

    def fit(self, weight: Tensor) -> Fitted:
        """Parameters for ``weight`` [out, in] (fp32)."""


@dataclass(frozen=True)
class Affine:
    """Uniform integers: value = scale · (code - zero) per row and group of inputs.

    Asymmetric ranges always contain 0; symmetric ones have 2^bits - 1 steps with zero at 2^(bits-1), as GPTQ's
    (arXiv:2210.17323). ``mse`` shrinks each range by the factor in 1, 0.99, …, 0.21 of least |error|^2.4.
    """

    bits: int
    group_size: int = 0
    """Inputs that share a scale; 0: the whole row."""
    symmetric: bool = True
    mse: bool = False
    scale_dtype: torch.dtype = torch.float16
    """Dtype of the scales; the grid uses them as stored, so that a file holds exactly what was solved."""

    def fit(self, weight: Tensor) -> FittedAffine:
        """Scales and zeros of ``weight``."""
        out, width = weight.shape
        group = self.group_size or width
        grouped = weight.view(out, width // group, group)
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale, zero = self._parameters(low, high)
        if self.mse:
            scale, zero = self._shrunk(grouped, low, high, scale, zero)
        return FittedAffine(scale, zero, self)

    def _parameters(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        top = 2**self.bits - 1
        span = high - low
        scale = torch.where(span == 0, torch.ones_like(span), span / top)
        tiny = torch.finfo(self.scale_dtype).tiny
        scale = scale.clamp_min(tiny).to(self.scale_dtype).float()
        if self.symmetric:
            return scale, torch.full_like(scale, 2.0 ** (self.bits - 1))
        return scale, torch.round(-low / scale).clamp_(0, top)

    def _shrunk(self, w: Tensor, low: Tensor, high: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        top = 2**self.bits - 1
        best = torch.full_like(scale, torch.inf)
        for i in range(80):
            s, z = self._parameters(low * (1 - i / 100), high * (1 - i / 100))
            q = torch.round(w / s.unsqueeze(-1)).add_(z.unsqueeze(-1)).clamp_(0, top)
            error = q.sub_(z.unsqueeze(-1)).mul_(s.unsqueeze(-1)).sub_(w).abs_().pow_(2.4).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
        return scale, zero


class FittedAffine:
    """Scales and zeros [out, groups] of one weight."""

    def __init__(self, scale: Tensor, zero: Tensor, grid: Affine) -> None:
        self.scale, self.zero, self.grid = scale, zero, grid
        self._scale, self._zero = scale.t().contiguous(), zero.t().contiguous()  # [groups, out]

    @property
    def whole_rows(self) -> bool:
        """Whether a row is one group."""
        return len(self._scale) == 1

    def _group(self, column: int) -> int:
        return column // self.grid.group_size if self.grid.group_size else 0

    def snap(self, x: Tensor, column: int, out: Tensor) -> None:
        """Round to the grid of the column's group."""
        g = self._group(column)
        scale, zero = self._scale[g], self._zero[g]
        torch.div(x, scale, out=out)
        out.round_().add_(zero).clamp_(0, 2**self.grid.bits - 1).sub_(zero).mul_(scale)

    def pack(self, weight: Tensor, outliers: PackedOutliers | None = None) -> Packed:
        """Integer codes of a weight's nearest grid values."""
        out, width = weight.shape
        group = self.grid.group_size or width
        codes = (weight.view(out, -1, group) / self.scale.unsqueeze(-1)).round_().add_(self.zero.unsqueeze(-1))
        codes = codes.clamp_(0, 2**self.grid.bits - 1).to(torch.uint8).view(out, width)
        zero = None if self.grid.symmetric else self.zero.to(torch.uint8)
        return Packed(codes, self.scale.to(self.grid.scale_dtype), zero, self.grid.bits, group, outliers)


@dataclass(frozen=True)
class TernaryGrid:
    """Per row: its minimum, 0, and its maximum (QMoE, arXiv:2310.16795). The wide range rounds most weights to zero,
    which the encoding of :mod:`ridgeline.nn.quant.ternary` relies on."""

    scale_dtype: torch.dtype = torch.float16
    """Dtype of the two values; the grid uses them as stored."""

    def fit(self, weight: Tensor) -> FittedTernary:
        """The extremes of each row, including 0."""
        low, high = weight.amin(1).clamp_max(0), weight.amax(1).clamp_min(0)
        return FittedTernary(low.to(self.scale_dtype), high.to(self.scale_dtype))


class FittedTernary:
    """Extremes [out] of one weight."""

    whole_rows = True

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high
        self._low, self._high = low.float(), high.float()

    def snap(self, x: Tensor, column: int, out: Tensor) -> None:
        """The nearest of the three: beyond half of an extreme, that extreme."""
        kept = torch.where(x > self._high / 2, self._high, 0).add_(torch.where(x < self._low / 2, self._low, 0))
        out.copy_(kept)

    def pack(self, weight: Tensor, outliers: PackedOutliers | None = None) -> Code:
        """Codewords of a weight on the grid."""
        assert outliers is None
        return Code.encode((weight < 0).to(torch.uint8) + 2 * (weight > 0).to(torch.uint8), self.low, self.high)


def nearest(weight: Tensor, fitted: Fitted) -> Tensor:
    """Round-to-nearest of a whole weight [out, in] on a fitted grid."""
    transposed = weight.t().clone(memory_format=torch.contiguous_format)  # a copy, also of a single row
    for j, column in enumerate(transposed):
        fitted.snap(column, j, column)
    return transposed.t().contiguous()
