"""A pruned weight on disk: one bit per entry, and the nonzero entries.

Other tools have dropped their sparse formats and store pruned weights densely, with zeros. No kernel computes from this
format: it is expanded when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.nn.quant.packed import pack_bits, unpack_bits


@dataclass(frozen=True)
class Sparse:
    """A weight [out, in] as a bitmask and its non-zero values."""

    mask: Tensor
    """int32 [out, ceil(in / 32)], little-endian along the row."""
    values: Tensor
    """[non-zeros], row by row."""
    width: int

    @classmethod
    def of(cls, weight: Tensor) -> Sparse:
        """The record of a dense weight [out, in]."""
        kept = weight != 0
        return cls(pack_bits(kept.to(torch.uint8), 1), weight[kept], weight.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.mask.shape[0], self.width

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight."""
        return 8 * (self.mask.nbytes + self.values.nbytes) / (self.mask.shape[0] * self.width)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight."""
        weight = torch.zeros(self.shape, dtype=dtype, device=self.values.device)
        weight[unpack_bits(self.mask, 1, self.width).bool()] = self.values.to(dtype)
        return weight

    def rows(self, start: int, stop: int) -> Sparse:
        """The record for some of the rows."""
        counts = unpack_bits(self.mask, 1, self.width).sum(1, dtype=torch.int64).cumsum(0)
        first = int(counts[start - 1]) if start else 0
        return Sparse(self.mask[start:stop], self.values[first : int(counts[stop - 1])], self.width)
