"""Quantized weights as our compiled CPU kernel reads them (``nn/kernels/lowbit.h``): 8- or 4-bit codes in tiles.

Inputs are rounded to 16-bit integers, with a scale per group of inputs, and multiplied exactly; results are the same
whatever else is in the batch.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.nn.kernels import native
from ridgeline.nn.quant.codes import Codes
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.torch_codes import wide_dtype
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_ROWS, LANES, TILE

_STEP = 4
"""Inputs of an output that lie side by side."""


class NativeCodes(Codes):
    """``codes``: uint8 [tiles, steps, 32, 4], of outputs and inputs, or two codes a byte: those of the first four
    inputs of eight in the low bits; ``scale`` and ``zero`` [tiles, groups, 32]: value = (code - middle - zero) · scale,
    with middle 128 (bytes) or 8 (nibbles). The last tile is filled up."""

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
        scale = packed.scale if packed.floating or packed.scale.dtype in native.TYPES else packed.scale.float()
        middle = 1 << (packed.bits - 1)
        zero = None if packed.zero is None else packed.zero.to(scale.dtype) - middle
        codes = packed.codes if packed.floating else packed.codes + ((1 << (bits - 1)) - middle)
        self._hold(codes, scale, zero)

    def _hold(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Hold codes uint8 [out, in], scales and zeros [out, groups]."""
        held = _tiled(codes, 2 * _STEP if self.bits == 4 else _STEP)
        if self.bits == 4:  # [tiles, steps, outputs, eight inputs]
            held = held[..., :_STEP] | (held[..., _STEP:] << 4)
        self.hold(codes=held.contiguous(), scale=_tiled(scale, 1).squeeze(-1).contiguous(),
                  zero=None if zero is None else _tiled(zero, 1).squeeze(-1).contiguous())  # fmt: skip

    def _whole(self, start: int, stop: int) -> Tensor:
        """Codes of some rows, one each: uint8 [rows, in]."""
        first, last = start // TILE, -(-stop // TILE)
        held = self.codes[first:last]
        if self.bits == 4:
            held = torch.cat((held & 15, held >> 4), -1)
        return _apart(held)[start - first * TILE : stop - first * TILE, : self.width]

    def _numbers(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros of some rows, [rows, groups]."""
        first, last = start // TILE, -(-stop // TILE)
        own = slice(start - first * TILE, stop - first * TILE)
        apart = [None if t is None else _apart(t[first:last, ..., None])[own] for t in (self.scale, self.zero)]
        assert apart[0] is not None
        return apart[0], apart[1]

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Codes`."""
        y = torch.empty(stop - start, self.width, dtype=dtype if dtype in native.TYPES else torch.float32)
        native.lowbit_expand(self.described(None), start, stop, y)
        return y.to(dtype)

    def _fill(self, new: Codes, dim: int, start: int, stop: int) -> None:
        assert isinstance(new, NativeCodes)
        if dim == 0:
            new._hold(self._whole(start, stop), *self._numbers(start, stop))
            return
        scale, zero = self._numbers(0, self.out)
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
        new._hold(self._whole(0, self.out)[:, start:stop], scale, zero)

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


def _tiled(t: Tensor, inputs: int) -> Tensor:
    """[out, in] → [tiles, ⌈in / inputs⌉, 32, inputs], filled up with zeros."""
    out, width = t.shape
    padded = F.pad(t, (0, -width % inputs, 0, -out % TILE))
    return padded.view(-1, TILE, padded.shape[1] // inputs, inputs).transpose(1, 2)


def _apart(tiles: Tensor) -> Tensor:
    """[tiles, steps, 32, inputs] → [32 · tiles, steps · inputs]."""
    return tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1)
