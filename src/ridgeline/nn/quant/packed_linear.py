"""Linear layers that compute from low-bit weights: few rows directly from them, many from a dequantized weight.

Two ways to compute. *Exact* dequantizes to fp32: the reference. *Fast* is what is fastest on the hardware; on a CPU it
rounds activations to bf16, because PyTorch's kernels for packed weights take a scalar path on any other type.
Activations are quantized to integers only where an :class:`InputCode` is given, in both ways alike.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from math import gcd
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.quant.activation_quant import InputCode, code_input, fake_quantize
from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_BYTES, FEW_NIBBLES, NIBBLE_GROUPS, held

_BLOCK = 2**20
"""Number of weights that are expanded at a time."""
_NIBBLE_ROWS = 64
"""A multiple of the rows that kernels for nibbles interleave."""


M = TypeVar("M", bound=nn.Module)


def _bare(module: M) -> M:
    """Another of the same kind with the same settings, and no tensors yet."""
    new = copy.copy(module)
    new._parameters, new._modules = {}, {}
    return new


def _cpu_has(feature: str) -> bool:
    supported = getattr(torch.cpu, f"_is_{feature}_supported", None)  # private to PyTorch: not in every version
    return bool(supported and supported())


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
        new = _bare(self)
        new.out, new.width = (stop - start, self.width) if dim == 0 else (self.out, stop - start)
        self._fill(new, dim, start, stop)
        return new

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        raise NotImplementedError

    def columns(self, index: Tensor) -> Tensor:
        """Some inputs' columns of the weight, [out, k] fp32."""
        step = max(_NIBBLE_ROWS, _BLOCK // self.width // _NIBBLE_ROWS * _NIBBLE_ROWS)
        spans = [(at, min(self.out, at + step)) for at in range(0, self.out, step)]
        return torch.cat([self.rows(a, b, torch.float32)[:, index] for a, b in spans])

    def expanded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` [M, in] times the weight, expanded to ``dtype`` in blocks of rows → [M, out] fp32."""
        x = x.to(dtype)
        y = torch.empty(len(x), self.out, device=x.device)
        step = max(_NIBBLE_ROWS, _BLOCK // self.width // _NIBBLE_ROWS * _NIBBLE_ROWS)
        for at in range(0, self.out, step):
            end = min(self.out, at + step)
            y[:, at:end] = F.linear(x, self.rows(at, end, dtype))
        return y

    def product(self, x: Tensor) -> Tensor:
        """``x`` [M, in] times the weight → [M, out] fp32, the fast way."""
        raise NotImplementedError

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
        self.bits, self.group = packed.bits, packed.group_size
        self.hold(words=pack_bits(packed.codes, packed.bits), scale=packed.scale, zero=packed.zero)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        zero = None if self.zero is None else self.zero[start:stop]
        codes = unpack_bits(self.words[start:stop], self.bits, self.width)
        return Packed(codes, self.scale[start:stop], zero, self.bits, self.group).dense(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, Words)
        if dim == 0:
            zero = None if self.zero is None else self.zero[start:stop].clone()
            new.hold(words=self.words[start:stop].clone(), scale=self.scale[start:stop].clone(), zero=zero)
            return
        codes = unpack_bits(self.words, self.bits, self.width)[:, start:stop]
        new.group, groups = _groups(self.group, start, stop, self.scale.device)
        zero = None if self.zero is None else self.zero[:, groups]
        new.hold(words=pack_bits(codes.contiguous(), self.bits), scale=self.scale[:, groups], zero=zero)

    def product(self, x: Tensor) -> Tensor:
        """On CUDA a Triton kernel that expands in registers; elsewhere there is none."""
        from ridgeline.nn.kernels.dispatch import has_triton

        if x.is_cuda and has_triton():
            from ridgeline.nn.kernels.lowbit_matmul import lowbit_product

            y: Tensor = lowbit_product(x, self.words, self.scale, self.zero, self.bits, self.group)
            return y
        return self.expanded(x, torch.float32)


def _groups(group: int, start: int, stop: int, device: torch.device) -> tuple[int, Tensor]:
    """(group size, the old groups as the new ones' sources) of inputs ``start`` to ``stop``: as large as fits both."""
    size = gcd(group, start, stop - start)
    return size, torch.arange(start, stop, size, device=device) // group


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
            step = max(64, _BLOCK // self.width)
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
        group, groups = (self.group, None) if dim == 0 else _groups(self.group, start, stop, self.planes[0].device)
        if new.out % 16 or group not in NIBBLE_GROUPS:
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
        if len(x) > FEW_NIBBLES:
            return self.expanded(x, wide_dtype())
        low = x.to(torch.bfloat16)
        y: Tensor | None = None
        for plane, affine in self._pairs:
            part = _int4_product(low, plane, self.group, affine)
            y = part.float() if y is None else y.add_(part)
        assert y is not None
        return y


def make_codes(packed: Packed, device: torch.device, fast: bool = True) -> Codes:
    """What :func:`ridgeline.spec.lowbit.held` says this weight is held as."""
    form = held(*packed.shape, packed.bits, packed.group_size, device.type, fast)
    if form.form == "nibbles" and nibble_layout() is not None:
        return Nibbles(packed, form.planes, form.group)
    if form.form == "bytes":
        return Bytes(packed)
    return Words(packed)


class PackedLinear(nn.Module):
    """A linear layer that holds only quantized weights. The record it is created from need not be kept."""

    def __init__(
        self, packed: Packed, bias: Tensor | None = None, input: InputCode | None = None, fast: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """``bias`` [out]. ``input``: how inputs are quantized; None: not. ``fast``: see the module."""
        super().__init__()
        device = torch.device(device)
        self.out_features, self.in_features = packed.shape
        self.bits, self.group_size, self.input, self.fast = packed.bits, packed.group_size, input, fast
        self.codes = make_codes(packed, device, fast).to(device)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device), requires_grad=False)
        self.aside: nn.Parameter | None = None
        """Values of the outliers, which ``_aside`` stores in rows."""
        if packed.outliers is not None and packed.outliers.index.numel():
            index, values = packed.outliers.index.long(), packed.outliers.values.float()
            self._keep_aside(torch.stack((index // self.in_features, index % self.in_features)), values, device)

    def _keep_aside(self, at: Tensor, values: Tensor, device: torch.device) -> None:
        """Store the outliers ``at`` [2, k] (rows, columns) in full precision."""
        shape = (self.out_features, self.in_features)
        self._aside = torch.sparse_coo_tensor(at, values, shape, device=device, check_invariants=False).coalesce()
        self.aside = nn.Parameter(self._aside.values(), requires_grad=False)
        self.places = nn.Parameter(self._aside.indices(), requires_grad=False)

    def part(self, dim: int, at: int, of: int) -> PackedLinear:
        """Part ``at`` of ``of`` equal ones: of the outputs (``dim`` 0), with their biases, or of the inputs (1),
        without the bias; nothing is rounded again. A part of the inputs is quantized by its own largest magnitude.

        Raises :class:`Incompatible` where the kernel that reads the codes cannot read such a part.
        """
        size = (self.out_features, self.in_features)[dim] // of
        start, stop = at * size, (at + 1) * size
        new = _bare(self)
        new.codes = self.codes.part(dim, start, stop)
        new.out_features, new.in_features = new.codes.out, new.codes.width
        own = self.bias if dim == 0 else None
        new.bias = None if own is None else nn.Parameter(own[start:stop].clone(), requires_grad=False)
        new.aside = None
        if self.aside is not None:
            places = self._aside.indices()
            inside = (places[dim] >= start) & (places[dim] < stop)
            if inside.any():
                moved = places[:, inside].clone()
                moved[dim] -= start
                new._keep_aside(moved, self._aside.values()[inside], places.device)
        return new

    def dense(self) -> Tensor:
        """The weight [out, in] in fp32, as used in computation."""
        weight = self.codes.rows(0, self.out_features, torch.float32)
        return weight if self.aside is None else weight + self._aside.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if self.input is None:
            y = self.codes.product(rows) if self.fast else self.codes.expanded(rows, torch.float32)
        else:
            y = self._coded(rows, self.input)
        if self.aside is not None:
            y += torch.sparse.mm(self._aside, rows.float().t()).t()
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _coded(self, x: Tensor, code: InputCode) -> Tensor:
        """The product with inputs rounded to integers; wide ones are taken out and multiplied as they are (LLM.int8,
        arXiv:2208.07339, section 3)."""
        x = x.float()
        if not self.fast:
            return self.codes.expanded(fake_quantize(x, code), torch.float32)
        codes, scale, wide = code_input(x, code)
        y = self.codes.integer_product(codes).mul_(scale)
        if wide is not None and bool(wide.any()):
            index = wide.nonzero().squeeze(1)
            y.addmm_(x[:, index], self.codes.columns(index).t())
        return y
