"""Quantized weights as our compiled CPU kernel reads them (``nn/kernels/lowbit.h``): 8- or 4-bit codes in rows.

Inputs are rounded to 16-bit integers, with a scale per group of inputs, and multiplied exactly; results are the same
whatever else is in the batch.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ridgeline.nn.kernels import native
from ridgeline.nn.quant.codes import Codes
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.torch_codes import wide_dtype
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_ROWS, LANES

_PAIR = 2 * LANES
"""Inputs of one run of bytes with two codes each: the first half in the low bits, the second in the high ones."""


class NativeCodes(Codes):
    """``codes``: int8 [out, in], or uint8 [out, bytes] with two codes each; ``scale`` and ``zero`` [out, groups]:
    value = (code - zero) · scale, with 0 (bytes) or 8 (nibbles) where there is no ``zero``."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, packed: Packed, bits: int) -> None:
        """``bits``: 4 or 8, those of a code as it is held. Raises :class:`Incompatible` for other group sizes than a
        multiple of 32 or a whole row."""
        super().__init__(*packed.shape)
        self.bits, self.group, self.floating = bits, packed.group_size, packed.floating
        if self.group % LANES and self.group != self.width:
            raise Incompatible(f"groups of {self.group} are not read by the kernel", "choose a multiple of 32")
        if packed.floating:
            self.hold(codes=_pairs(packed.codes), scale=packed.scale.contiguous(), zero=None)
            return
        scale = packed.scale if packed.scale.dtype in native.TYPES else packed.scale.float()
        middle = 1 << (packed.bits - 1)
        if bits == 8:
            codes = packed.codes ^ 128 if middle == 128 else packed.codes - middle
            zero = None if packed.zero is None else packed.zero.to(scale.dtype) - middle
            self.hold(codes=codes.view(torch.int8), scale=scale, zero=zero)
        else:
            codes = packed.codes if packed.zero is not None else packed.codes + (8 - middle)
            zero = None if packed.zero is None else packed.zero.to(scale.dtype)
            self.hold(codes=_pairs(codes), scale=scale.contiguous(), zero=zero)

    def _whole(self, start: int, stop: int) -> Tensor:
        """Codes of some rows, one each: [rows, in], int8 or uint8."""
        return self.codes[start:stop] if self.bits == 8 else _apart(self.codes[start:stop], self.width)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        if self.floating:
            whole = self._whole(start, stop)
            return Packed(whole, self.scale[start:stop], None, 4, self.group, floating=True).dense(dtype)
        codes = self._whole(start, stop).to(torch.float32).view(stop - start, -1, self.group)
        zero = self.zero
        codes -= (0.0 if self.bits == 8 else 8.0) if zero is None else zero[start:stop].float().unsqueeze(-1)
        return codes.mul_(self.scale[start:stop].float().unsqueeze(-1)).view(stop - start, self.width).to(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, NativeCodes)
        scale, zero = self.scale, self.zero
        if dim == 0:
            new.hold(codes=self.codes[start:stop].clone(), scale=scale[start:stop].clone(),
                     zero=None if zero is None else zero[start:stop].clone())  # fmt: skip
            return
        if self.group == self.width:
            new.group = stop - start
        else:
            new.group = gcd(self.group, start, stop - start)
            if new.group % LANES:
                raise Incompatible(
                    f"{stop - start} of {self.width} inputs in groups of {self.group} are no part that the kernel for"
                    f" {self.bits}-bit weights reads",
                    "divide over fewer ranks",
                )
            groups = torch.arange(start, stop, new.group, device=scale.device) // self.group
            scale, zero = scale[:, groups], None if zero is None else zero[:, groups]
        codes = self._whole(0, self.out)[:, start:stop].contiguous()
        new.hold(codes=codes if self.bits == 8 else _pairs(codes), scale=scale.clone(),
                 zero=None if zero is None else zero.clone())  # fmt: skip

    def _call(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, exact: bool) -> Tensor:
        y = torch.empty((x.shape[0], self.out), dtype=dtype)
        native.lowbit_linear(self.described(bias), x, y, exact)
        return y

    def described(self, bias: Tensor | None) -> native.Linear:
        """The layer as the kernels read it, with its ``bias`` [out] fp32; it holds none of the tensors."""
        zero = None if self.zero is None else self.zero.data_ptr()
        kind, scale = (2, native.E8M0) if self.floating else (self.bits, native.TYPES[self.scale.dtype])
        return native.Linear(kind, self.codes.data_ptr(), self.scale.data_ptr(), zero,
                             None if bias is None else bias.data_ptr(), scale, self.out, self.width,
                             self.group)  # fmt: skip

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`Codes`."""
        if few(len(x)) and x.dtype in native.TYPES and not _differentiated(x):
            return self._call(x.contiguous(), None if bias is None else bias.float(), x.dtype, False)
        return super().linear(x, bias)

    def product(self, x: Tensor) -> Tensor:
        """Few rows by our kernel, and many too, unless the processor has matrix units."""
        if few(len(x)) and not _differentiated(x):
            return self._call(x.contiguous(), None, torch.float32, False)
        return self.expanded(x, wide_dtype())

    def integer_product(self, q: Tensor) -> Tensor:
        """Whole numbers are the kernel's own."""
        return self._call(q.contiguous(), None, torch.float32, True)


def few(rows: int) -> bool:
    """Whether our kernel is the fastest way for this number of rows."""
    return rows <= FEW_ROWS or wide_dtype() is torch.float32


def _differentiated(x: Tensor) -> bool:
    """Whether a gradient will be asked for, which the kernel does not have."""
    return x.requires_grad and torch.is_grad_enabled()


def _pairs(codes: Tensor) -> Tensor:
    """Codes uint8 [out, in], 0 … 15, two a byte, rows filled up with zeros: [out, 32 · ⌈in / 64⌉]."""
    out, width = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -width % _PAIR)).view(out, -1, 2, LANES)
    return (padded[:, :, 0] | (padded[:, :, 1] << 4)).flatten(1)


def _apart(pairs: Tensor, width: int) -> Tensor:
    """The codes again, uint8 [out, in]."""
    each = pairs.view(len(pairs), -1, LANES)
    return torch.stack((each & 15, each >> 4), 2).flatten(1)[:, :width]
