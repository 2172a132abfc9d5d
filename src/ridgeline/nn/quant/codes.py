"""What a linear layer holds of a quantized weight, and how it multiplies by it: the interface and the plain form."""

from __future__ import annotations

import copy
from math import gcd
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits

BLOCK = 2**20
"""Number of weights that are expanded at a time."""
_ROWS = 64
"""A multiple of the rows that kernels interleave."""

M = TypeVar("M", bound=nn.Module)


def bare(module: M) -> M:
    """Another of the same kind with the same settings, and no tensors yet."""
    new = copy.copy(module)
    new._parameters, new._modules = {}, {}
    return new


class Codes(nn.Module):
    """What a layer holds of a :class:`Packed` (outliers apart). In parameters, so that memory is counted."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.out, self.width = out, width

    def hold(self, **tensors: Tensor | None) -> None:
        """Register tensors as frozen parameters."""
        for name, t in tensors.items():
            setattr(self, name, None if t is None else nn.Parameter(t, requires_grad=False))

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [stop - start, in], expanded to ``dtype``."""
        raise NotImplementedError

    def part(self, dim: int, start: int, stop: int) -> Codes:
        """Some of the outputs (``dim`` 0) or inputs (1), in the same codes. Raises :class:`Incompatible` where the
        kernel that reads them cannot."""
        new = bare(self)
        new.out, new.width = (stop - start, self.width) if dim == 0 else (self.out, stop - start)
        self._fill(new, dim, start, stop)
        return new

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        raise NotImplementedError

    def columns(self, index: Tensor) -> Tensor:
        """Some inputs' columns of the weight, [out, k] fp32."""
        step = max(_ROWS, BLOCK // self.width // _ROWS * _ROWS)
        spans = [(at, min(self.out, at + step)) for at in range(0, self.out, step)]
        return torch.cat([self.rows(a, b, torch.float32)[:, index] for a, b in spans])

    def expanded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` [M, in] times the weight, expanded to ``dtype`` in blocks of rows → [M, out] fp32."""
        x = x.to(dtype)
        y = torch.empty(len(x), self.out, device=x.device)
        step = max(_ROWS, BLOCK // self.width // _ROWS * _ROWS)
        for at in range(0, self.out, step):
            end = min(self.out, at + step)
            y[:, at:end] = F.linear(x, self.rows(at, end, dtype))
        return y

    def product(self, x: Tensor) -> Tensor:
        """``x`` [M, in] times the weight → [M, out] fp32, the fast way."""
        raise NotImplementedError

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same with ``bias`` [out] fp32 → [M, out] in the dtype of ``x``."""
        y = self.product(x)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def integer_product(self, q: Tensor) -> Tensor:
        """``q`` [M, in] of whole numbers up to 127 (fp32) times the weight → [M, out] fp32."""
        return self.product(q)  # bf16 has them exactly


class Words(Codes):
    """The bits as stored, in 32-bit words along the inputs."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, packed: Packed) -> None:
        super().__init__(*packed.shape)
        self.bits, self.group, self.floating = packed.bits, packed.group_size, packed.floating
        self.hold(words=pack_bits(packed.codes, packed.bits), scale=packed.scale, zero=packed.zero)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        zero = None if self.zero is None else self.zero[start:stop]
        codes = unpack_bits(self.words[start:stop], self.bits, self.width)
        scale = self.scale[start:stop]
        return Packed(codes, scale, zero, self.bits, self.group, floating=self.floating).dense(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, Words)
        if dim == 0:
            zero = None if self.zero is None else self.zero[start:stop].clone()
            new.hold(words=self.words[start:stop].clone(), scale=self.scale[start:stop].clone(), zero=zero)
            return
        codes = unpack_bits(self.words, self.bits, self.width)[:, start:stop]
        new.group, groups = split_groups(self.group, start, stop, self.scale.device)
        zero = None if self.zero is None else self.zero[:, groups]
        new.hold(words=pack_bits(codes.contiguous(), self.bits), scale=self.scale[:, groups], zero=zero)

    def product(self, x: Tensor) -> Tensor:
        """On CUDA a Triton kernel that expands in registers; elsewhere there is none."""
        from ridgeline.nn.kernels.dispatch import has_triton

        if x.is_cuda and has_triton() and not self.floating:
            from ridgeline.nn.kernels.lowbit_matmul import lowbit_product

            y: Tensor = lowbit_product(x, self.words, self.scale, self.zero, self.bits, self.group)
            return y
        return self.expanded(x, torch.float32)


def split_groups(group: int, start: int, stop: int, device: torch.device) -> tuple[int, Tensor]:
    """(group size, the old groups as the new ones' sources) of inputs ``start`` to ``stop``: as large as fits both."""
    size = gcd(group, start, stop - start)
    return size, torch.arange(start, stop, size, device=device) // group
