"""What a linear layer holds of a quantized weight, and how it multiplies by it: the interface and the plain form."""

from __future__ import annotations

import copy
from math import gcd
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import MANY_ROWS, STRIPES, striped, wide_bits

BLOCK = 2**20
"""Number of weights that are expanded at a time."""
COUNTED, COUNTERS = 128, 8
"""Outputs of a weight, and counters of programs for them: no kernel has more programs side by side."""
_ROWS = 64
"""A multiple of the rows that kernels interleave."""

M = TypeVar("M", bound=nn.Module)


def bare(module: M) -> M:
    """Another of the same kind with the same settings, and no tensors yet."""
    new = copy.copy(module)
    new._parameters, new._modules = {}, {}
    return new


def counters(out: int, device: torch.device) -> Tensor:
    """int32 zeros for the programs of a weight with ``out`` outputs."""
    return torch.zeros(-(-out // COUNTED) * COUNTERS, dtype=torch.int32, device=device)


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
        """There is no kernel for this form: the weight is expanded, on a GPU to the dtype of ``x``."""
        return self.expanded(x, x.dtype if x.is_cuda else torch.float32)


class Stripes(Codes):
    """Codes of 2, 4 or 8 bits as Triton kernels read them: inputs are cut into blocks, and a block into as many stripes
    as a 32-bit word has codes; code i of word j belongs to input j of stripe i. Scales [groups, out]; uint8 exponents
    of codes that are numbers themselves (MXFP4)."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    arrived: Tensor
    """int32 zeros, in which programs that share outputs count themselves: one product of a weight runs at a time."""

    def __init__(self, packed: Packed) -> None:
        super().__init__(*packed.shape)
        self.group, self.floating = packed.group_size, packed.floating
        self.center = 0 if packed.floating else 1 << (packed.bits - 1)
        self.bits = wide_bits(packed.bits)
        self._take(packed.codes, packed.scale.t(), None if packed.zero is None else packed.zero.t())

    def _take(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Hold codes [out, in] and scales and zeros [groups, out]."""
        self.stripe = striped(self.width, self.bits, self.group)
        per = 32 // self.bits
        codes = F.pad(codes, (0, -self.width % (per * self.stripe)))
        codes = codes.view(self.out, -1, per, self.stripe).transpose(2, 3).reshape(self.out, -1)
        zero = None if zero is None else zero.contiguous()
        self.hold(words=pack_bits(codes, self.bits), scale=scale.contiguous(), zero=zero)
        self.register_buffer("arrived", counters(self.out, codes.device), persistent=False)

    def _codes(self, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, in], in the order of the inputs."""
        words = self.words[start:stop]
        codes = unpack_bits(words, self.bits, words.shape[1] * (32 // self.bits))
        codes = codes.view(stop - start, -1, self.stripe, 32 // self.bits).transpose(2, 3)
        return codes.reshape(stop - start, -1)[:, : self.width]

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        codes = self._codes(start, stop)
        if self.floating:
            held = Packed(codes, self.scale[:, start:stop].t(), None, self.bits, self.group, floating=True)
            return held.dense(dtype)
        codes = codes.reshape(stop - start, -1, self.group).float()
        zero = float(self.center) if self.zero is None else self.zero[:, start:stop].t().float().unsqueeze(-1)
        scale = self.scale[:, start:stop].t().float().unsqueeze(-1)
        return (codes - zero).mul_(scale).view(stop - start, self.width).to(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, Stripes)
        new._buffers = {}
        if dim == 0:
            zero = None if self.zero is None else self.zero[:, start:stop]
            new._take(self._codes(start, stop), self.scale[:, start:stop], zero)
            return
        new.group, groups = split_groups(self.group, start, stop, self.scale.device)
        if not striped(new.width, self.bits, new.group):
            raise Incompatible(
                f"{stop - start} inputs of a weight with groups of {self.group} are not read by the kernel",
                f"choose parts of whole groups, or of multiples of {STRIPES[-1]} inputs",
            )
        zero = None if self.zero is None else self.zero[groups]
        new._take(self._codes(0, self.out)[:, start:stop], self.scale[groups], zero)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Codes`."""
        return self._product(x, None, torch.float32)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`Codes`."""
        return self._product(x, bias, x.dtype)

    def integer_product(self, q: Tensor) -> Tensor:
        """See :class:`Codes`."""
        return self.product(q.to(torch.bfloat16))  # which has them exactly

    def most_rows(self, device: torch.device) -> int:
        """Rows of an expert up to which :meth:`grouped` is faster than its expanded weight."""
        return MANY_ROWS

    def grouped(self, x: Tensor, starts: Tensor, experts: int, bias: Tensor | None) -> Tensor:
        """The product of all experts, whose weights these are, on a GPU: see
        :func:`~ridgeline.nn.kernels.grouped_codes.grouped_product`."""
        from ridgeline.nn.kernels.grouped_codes import grouped_product

        given = (self.words, self.scale, self.zero, self.bits, self.center, self.group, self.stripe, self.arrived)
        return grouped_product(x, starts, experts, *given, bias)

    def _product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        from ridgeline.nn.kernels.dispatch import has_triton

        if not x.is_cuda or not has_triton():
            y = self.expanded(x, torch.float32)
            return (y if bias is None else y + bias).to(dtype)
        from ridgeline.nn.kernels.lowbit_matmul import lowbit_product

        given = (self.words, self.scale, self.zero, self.bits, self.center, self.group, self.stripe, self.arrived)
        done: Tensor = lowbit_product(x, *given, bias, dtype)
        return done


def split_groups(group: int, start: int, stop: int, device: torch.device) -> tuple[int, Tensor]:
    """(group size, the old groups as the new ones' sources) of inputs ``start`` to ``stop``: as large as fits both."""
    size = gcd(group, start, stop - start)
    return size, torch.arange(start, stop, size, device=device) // group
