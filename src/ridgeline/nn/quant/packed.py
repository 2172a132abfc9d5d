"""The quantization result for one weight matrix, and its exact packing into bits.

Solvers return this record, formats write and read it, and kernels are built from it; nothing is rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """The stored form of a weight [out, in] that is not dense: :class:`Packed` integers, or a format of our own."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, including all metadata."""

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight."""

    def rows(self, start: int, stop: int) -> Stored:
        """The record for some of the rows (layers that were solved together are separated again)."""


@dataclass(frozen=True)
class PackedOutliers:
    """Entries of a weight [out, in] that are stored separately as outliers."""

    index: Tensor
    """int32 [k], into the flattened weight, ascending."""
    values: Tensor
    """[k], in the dtype that is stored."""

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.index.nbytes + self.values.nbytes


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""What the codes of 4-bit floating point stand for (OCP Microscaling Formats, version 1.0)."""
E8M0_BIAS = 127
"""Subtracted from an exponent that is stored in 8 bits."""


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] as integers on grids: value = scale · (code - zero), per row and group of inputs."""

    codes: Tensor
    """uint8 [out, in], 0 … 2^bits - 1."""
    scale: Tensor
    """[out, groups], in the dtype that is stored (fp16, bf16 or fp32)."""
    zero: Tensor | None
    """uint8 [out, groups]; None: symmetric, 2^(bits-1)."""
    bits: int
    group_size: int
    """Inputs that share a scale; ``in`` where a whole row does."""
    outliers: PackedOutliers | None = None
    floating: bool = False
    """Whether codes are E2M1 numbers (MXFP4) instead of steps, and scales uint8 exponents: value = 2^(scale - 127) ·
    number, with 4 bits and without zeros."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def symmetric(self) -> bool:
        """Whether zero is the middle code everywhere."""
        return self.zero is None

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] in ``dtype``, computed in fp32."""
        out, width = self.shape
        if self.floating:
            numbers = E2M1.to(self.codes.device)[self.codes.long()].view(out, -1, self.group_size)
            return torch.ldexp(numbers, self.scale.int().unsqueeze(-1) - E8M0_BIAS).view(out, width).to(dtype)
        codes = self.codes.view(out, -1, self.group_size).float()
        zero = float(1 << (self.bits - 1)) if self.zero is None else self.zero.float().unsqueeze(-1)
        weight = (codes - zero).mul_(self.scale.float().unsqueeze(-1)).view(out, width)
        if self.outliers is not None:
            flat, index = weight.view(-1), self.outliers.index.long()
            flat[index] += self.outliers.values.float()
        return weight.to(dtype)

    def rows(self, start: int, stop: int) -> Packed:
        """The record for some of the rows (layers that were solved together are separated again)."""
        width = self.shape[1]
        outliers = self.outliers
        if outliers is not None:
            inside = (outliers.index >= start * width) & (outliers.index < stop * width)
            outliers = PackedOutliers(outliers.index[inside] - start * width, outliers.values[inside])
        zero = None if self.zero is None else self.zero[start:stop]
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop], zero=zero, outliers=outliers)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight: codes, scales, zeros (packed like codes) and outliers."""
        out, width = self.shape
        total = self.bits * width * out + 8 * self.scale.nbytes
        total += 0 if self.zero is None else self.bits * self.zero.numel()
        total += 0 if self.outliers is None else 8 * self.outliers.nbytes
        return total / (out * width)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, n] → int32 [rows, ceil(n·bits / 32)]: dense, little-endian along the row, across words."""
    if 8 % bits:
        return _packed_eights(codes, bits)
    rows, n = codes.shape
    words = -(-n * bits // 32)
    short = -n % (32 // bits)
    parts = torch.nn.functional.pad(codes, (0, short)) if short else codes
    while bits < 8:  # neighbors are combined into one code of twice the bits
        parts, bits = parts[:, 1::2].bitwise_left_shift(bits).bitwise_or_(parts[:, ::2]), 2 * bits
    return _aligned(parts).view(torch.int32).view(rows, words)


def _aligned(x: Tensor) -> Tensor:
    """``x`` in one dimension, where a larger dtype can view it."""
    flat = x.reshape(-1).contiguous()
    return flat.clone() if flat.storage_offset() % 8 else flat


def _packed_eights(codes: Tensor, bits: int) -> Tensor:
    """:func:`pack_bits` of codes that no byte holds evenly: eight of them fill ``bits`` bytes."""
    rows, n = codes.shape
    whole = torch.nn.functional.pad(codes, (0, -n % 8)) if n % 8 else codes
    eights, lane, size = _aligned(whole).view(torch.int64), 8, bits
    while lane < 64:  # of two neighbors, the upper moves down to the lower
        low = sum(((1 << size) - 1) << at for at in range(0, 64, 2 * lane))
        upper = eights.bitwise_right_shift(lane - size).bitwise_and_(low << size)
        eights, lane, size = eights.bitwise_and(low).bitwise_or_(upper), 2 * lane, 2 * size
    held = eights.unsqueeze(-1).view(torch.uint8)[..., :bits].reshape(rows, -(-n // 8) * bits)
    words = -(-n * bits // 32)
    short = 4 * words - held.shape[1]  # below 0: of the padding
    held = torch.nn.functional.pad(held, (0, short)) if short else held
    return _aligned(held).view(torch.int32).view(rows, words)


def unpack_bits(words: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of :func:`pack_bits`: uint8 [rows, n]."""
    rows = words.shape[0]
    if 32 % bits == 0:
        shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
        codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.reshape(rows, -1)[:, :n].to(torch.uint8)
    spread = ((words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1).to(torch.uint8)
    flat = spread.reshape(rows, -1)[:, : n * bits].reshape(rows, n, bits)
    return (flat << torch.arange(bits, device=words.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
