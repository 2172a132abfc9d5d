"""Quantized weights as PyTorch's own CPU kernels read them: int8 rows and planes of 4-bit codes.

The kernels round inputs to bf16; on any other type they take a scalar path. They are used where our own kernels cannot
be compiled (see :mod:`ridgeline.nn.quant.native_codes`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.quant.codes import BLOCK, Codes, Words, split_groups
from ridgeline.nn.quant.packed import Packed
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_ROWS

FEW_BYTES = 16
"""Rows up to which the kernel for int8 beats widening the codes."""
GROUPS = (256, 128, 64, 32)
"""Group sizes of the kernel for 4-bit weights."""


def _cpu_has(feature: str) -> bool:
    supported = getattr(torch.cpu, f"_is_{feature}_supported", None)  # private to PyTorch: not in every version
    return bool(supported and supported())


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products in bf16."""
    return _cpu_has("avx512_bf16") or _cpu_has("amx_tile")


@lru_cache(maxsize=1)
def wide_dtype() -> torch.dtype:
    """Dtype in which a CPU multiplies dequantized weights: bf16 if it has matrix units for it, else fp32."""
    return torch.bfloat16 if _cpu_has("amx_tile") else torch.float32


class Int4Layout(NamedTuple):
    """How PyTorch's kernel for 4-bit weights lays out rows.

    Of every ``rows`` of them, byte d of an input holds row d in its low and row d + ``rows`` / 2 in its high half
    (``halves``), or rows 2d and 2d + 1; those left over are in pairs.
    """

    rows: int
    halves: bool


_LAYOUTS = (Int4Layout(64, True), Int4Layout(32, True), Int4Layout(32, False))
"""With AVX-512, with AVX2, and without either."""


@lru_cache(maxsize=1)
def nibble_layout() -> Int4Layout | None:
    """The layout on this CPU; None where it is none of those that :func:`unpack_nibbles` knows."""
    row = torch.arange(112, dtype=torch.int32)[:, None]
    codes = (5 * row + row // 16 + 7 * torch.arange(32, dtype=torch.int32)) % 16  # neighboring rows all differ
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    want = codes.to(torch.uint8)
    return next((x for x in _LAYOUTS if torch.equal(unpack_nibbles(packed, 0, 112, x), want)), None)


@lru_cache(maxsize=1)
def multiplies_int8() -> bool:
    """Whether this CPU multiplies int8 natively and exactly: without VNNI, sums of two products saturate."""
    if not _cpu_has("vnni"):
        return False
    extreme = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(extreme, extreme.t()) == 64 * 127**2).all())


def unpack_nibbles(packed: Tensor, start: int, stop: int, layout: Int4Layout | None = None) -> Tensor:
    """Rows ``start`` (a multiple of 64) to ``stop`` of codes uint8 [out, in] that PyTorch packed as [out, in / 2]."""
    block, halves = layout or nibble_layout() or _LAYOUTS[0]
    width = packed.shape[1] * 2
    flat = packed.view(-1)
    whole = min(stop, packed.shape[0] // block * block)
    out = torch.empty(stop - start, width, dtype=torch.uint8, device=packed.device)
    if whole > start:
        _spread(flat[start * width // 2 : whole * width // 2].view(-1, width, block // 2), halves, out[: whole - start])
    if whole < stop:
        _spread(flat[whole * width // 2 :].view(1, width, -1), False, out[whole - start :])
    return out


def _spread(blocks: Tensor, halves: bool, out: Tensor) -> None:
    """Blocks of bytes [n, in, rows / 2] into their rows [n · rows, in]."""
    n, width, half = blocks.shape
    low, high = (blocks & 15).transpose(1, 2), (blocks >> 4).transpose(1, 2)
    rows = out.view(n, 2, half, width) if halves else out.view(n, half, 2, width).transpose(1, 2)
    rows[:, 0], rows[:, 1] = low, high


@lru_cache(maxsize=64)
def _ones(n: int) -> Tensor:
    """Scales that change nothing: the kernel would round ours to bf16."""
    with torch.inference_mode(False):
        return torch.ones(n, dtype=torch.bfloat16)


class Bytes(Codes):
    """int8 codes [out, in] with one fp32 scale per row, and for asymmetric ones what a row's codes are shifted by."""

    codes: Tensor
    scale: Tensor
    shift: Tensor | None

    def __init__(self, packed: Packed) -> None:
        super().__init__(*packed.shape)
        middle = 1 << (packed.bits - 1)
        shift = None if packed.zero is None else packed.zero.float().squeeze(1) - middle
        self.hold(codes=(packed.codes ^ 128 if middle == 128 else packed.codes - middle).view(torch.int8),
                  scale=packed.scale.float().squeeze(1), shift=shift)  # fmt: skip

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        codes = self.codes[start:stop].float()
        if self.shift is not None:
            codes -= self.shift[start:stop, None]
        return codes.mul_(self.scale[start:stop, None]).to(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        own = slice(start, stop) if dim == 0 else slice(None)
        codes = self.codes[start:stop] if dim == 0 else self.codes[:, start:stop]
        shift = None if self.shift is None else self.shift[own].clone()
        new.hold(codes=codes.clone(memory_format=torch.contiguous_format), scale=self.scale[own].clone(), shift=shift)

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        """(Σ x·code - shift · Σ x) · scale."""
        if self.shift is not None:
            y.addmm_(x.float().sum(1, keepdim=True), self.shift[None], alpha=-1)
        return y.mul_(self.scale)

    def product(self, x: Tensor) -> Tensor:
        """Few rows by PyTorch's kernel for int8 weights, many with the codes widened."""
        if len(x) <= FEW_BYTES and self.width % 16 == 0:  # the kernel reads past the end of other rows, unasked
            x = x.to(torch.bfloat16)
            y = torch._weight_int8pack_mm(x, self.codes, _ones(self.out)).float()
        else:
            wide = wide_dtype()
            x, y = x.to(wide), torch.empty(len(x), self.out)
            step = max(64, BLOCK // self.width)
            for at in range(0, self.out, step):
                y[:, at : at + step] = F.linear(x, self.codes[at : at + step].to(wide))
        return self._finish(y, x)

    def integer_product(self, q: Tensor) -> Tensor:
        """int8 by int8, summed in int32."""
        if not multiplies_int8():
            return self.expanded(q, torch.float32)
        y = torch._int_mm(q.to(torch.int8), self.codes.t()).float()
        return self._finish(y, q)


_int4_product = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Nibbles(Codes):
    """4-bit codes as PyTorch's CPU kernel reads them, one plane for up to 4 bits, two for more: 16 · high + low.

    ``planes[p]`` uint8 [out, in / 2]; ``affine[p]`` bf16 [groups, out, 2]: scale and offset, value = (code - 8) · scale
    + offset.
    """

    def __init__(self, packed: Packed, planes: int, group: int) -> None:
        super().__init__(*packed.shape)
        self.group, self.shifted = group, packed.zero is not None
        top = 8 if planes == 1 else 128
        scale = packed.scale.float().bfloat16().float()
        codes, offset = packed.codes, torch.zeros_like(scale)
        if packed.zero is None:
            codes = codes + (top - (1 << (packed.bits - 1)))  # as many steps above the kernel's zero as above its own
        else:
            offset = (top - packed.zero.float()) * scale
        halves = [(codes, scale)] if planes == 1 else [(codes >> 4, 16.0 * scale), (codes & 15, scale)]
        if planes == 2:
            offset = offset + 8.0 * scale  # of the low half, which has no sign
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.planes, self.affine = nn.ParameterList(), nn.ParameterList()
        for half, step in halves:
            rounded = offset.bfloat16()
            table = torch.stack((step.bfloat16(), rounded), -1).repeat_interleave(packed.group_size // group, 1)
            self.planes.append(nn.Parameter(pack(half.int(), 1), requires_grad=False))
            self.affine.append(nn.Parameter(table.transpose(0, 1).contiguous(), requires_grad=False))
            offset = offset - rounded.float()  # the next plane takes what bf16 could not say
        self._pairs = list(zip(self.planes, self.affine, strict=True))  # a ParameterList is slow to walk

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        total: Tensor | None = None
        for plane, affine in self._pairs:
            table = affine[:, start:stop].to(dtype).permute(2, 1, 0).unsqueeze(-1)  # [2, rows, groups, 1]
            weight = unpack_nibbles(plane, start, stop).to(dtype).view(stop - start, -1, self.group)
            weight.sub_(8.0).mul_(table[0])
            if self.shifted or len(self._pairs) > 1:
                weight += table[1]
            total = weight if total is None else total.add_(weight)
        assert total is not None
        return total.view(stop - start, self.width)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, Nibbles)
        n = stop - start
        group, groups = (self.group, None) if dim == 0 else split_groups(self.group, start, stop, self.planes[0].device)
        if new.out % 16 or group not in GROUPS:
            raise Incompatible(
                f"{n} of {self.out if dim == 0 else self.width} {'outputs' if dim == 0 else 'inputs'} in groups of"
                f" {self.group} are no part that the kernel for 4-bit weights reads",
                "divide over fewer ranks, or use 8 bits",
            )
        new.group, new.planes, new.affine = group, nn.ParameterList(), nn.ParameterList()
        for plane, affine in self._pairs:
            codes = unpack_nibbles(plane, 0, self.out)
            codes = codes[start:stop] if dim == 0 else codes[:, start:stop]
            table = affine[:, start:stop] if groups is None else affine[groups]
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)
            new.planes.append(nn.Parameter(packed, requires_grad=False))
            new.affine.append(nn.Parameter(table.clone(memory_format=torch.contiguous_format), requires_grad=False))
        new._pairs = list(zip(new.planes, new.affine, strict=True))

    def product(self, x: Tensor) -> Tensor:
        """Few rows by PyTorch's kernel for 4-bit weights, many with the weight expanded."""
        if len(x) > FEW_ROWS:
            return self.expanded(x, wide_dtype())
        low = x.to(torch.bfloat16)
        y: Tensor | None = None
        for plane, affine in self._pairs:
            part = _int4_product(low, plane, self.group, affine)
            y = part.float() if y is None else y.add_(part)
        assert y is not None
        return y


def torch_form(packed: Packed) -> Codes:
    """The form of a weight that PyTorch's kernels take; its stored bits where they take none."""
    group = packed.group_size
    if packed.floating:
        return Words(packed)
    if packed.bits > 4 and group == packed.shape[1]:
        return Bytes(packed)
    fitting = next((g for g in GROUPS if group % g == 0), 0)
    if packed.shape[0] % 16 == 0 and fitting and nibble_layout() is not None:
        return Nibbles(packed, 1 if packed.bits <= 4 else 2, fitting)
    return Words(packed)
