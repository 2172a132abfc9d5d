"""Quantized key/value caches: values are dequantized right before use (FlexGen, arXiv:2303.06865, section 4).

Shapes as in :mod:`ridgeline.nn.model.attention`: B batch, G key/value heads, T positions, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.nn.model.attention import LayerCache
from ridgeline.spec.lowbit import kv_group

At = slice | Tensor
"""Positions of a cache: a range, or their numbers [S]."""


class ByteCodes:
    """int8, with an fp16 scale for every token of every head."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.codes = torch.empty(shape, dtype=torch.int8, device=device)
        self.scale = torch.empty((*shape[:-1], 1), dtype=torch.float16, device=device)

    def write(self, at: At, x: Tensor) -> None:
        """Quantize ``x`` [B, G, S, D] into positions ``at``."""
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).div_(127.0).clamp_(2.0**-24, 65504.0).half()
        self.scale[:, :, at] = scale
        self.codes[:, :, at] = (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8)

    def read(self, at: At, dtype: torch.dtype) -> Tensor:
        """Positions ``at``, [B, G, S, D]."""
        return torch.mul(self.codes[:, :, at], self.scale[:, :, at].to(dtype))


class NibbleCodes:
    """Two codes per byte between the minimum and the maximum of each group of 64 along D, which are stored as an fp16
    minimum and scale."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.group = kv_group(shape[-1])
        self.codes = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
        groups = (*shape[:-1], shape[-1] // self.group, 1)
        self.scale = torch.empty(groups, dtype=torch.float16, device=device)
        self.least = torch.empty(groups, dtype=torch.float16, device=device)

    def write(self, at: At, x: Tensor) -> None:
        """Quantize ``x`` [B, G, S, D] into positions ``at``."""
        grouped = x.float().unflatten(-1, (-1, self.group))
        least = grouped.amin(-1, keepdim=True).half()
        span = grouped.amax(-1, keepdim=True) - least.float()
        scale = span.div_(15.0).clamp_(2.0**-24, 65504.0).half()
        self.least[:, :, at], self.scale[:, :, at] = least, scale
        codes = ((grouped - least.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
        half = codes.shape[-1] // 2
        self.codes[:, :, at] = codes[..., :half] | (codes[..., half:] << 4)

    def read(self, at: At, dtype: torch.dtype) -> Tensor:
        """Positions ``at``, [B, G, S, D]."""
        packed = self.codes[:, :, at]
        codes = torch.cat((packed & 15, packed >> 4), -1).to(dtype).unflatten(-1, (-1, self.group))
        return torch.addcmul(self.least[:, :, at].to(dtype), codes, self.scale[:, :, at].to(dtype)).flatten(-2)


class FloatCodes:
    """fp8 (e4m3) without a scale; values outside its range of ±448 are clamped."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)

    def write(self, at: At, x: Tensor) -> None:
        """Quantize ``x`` [B, G, S, D] into positions ``at``."""
        self.codes[:, :, at] = x.clamp(-448, 448).to(torch.float8_e4m3fn)

    def read(self, at: At, dtype: torch.dtype) -> Tensor:
        """Positions ``at``, [B, G, S, D]."""
        return self.codes[:, :, at].to(dtype)


Codes = ByteCodes | NibbleCodes | FloatCodes
KINDS: dict[str, Callable[[tuple[int, ...], torch.device], Codes]] = {
    "int8": ByteCodes, "int4": NibbleCodes, "fp8": FloatCodes,
}  # fmt: skip


class CodedCache(LayerCache):
    """Quantized keys and values of one layer; what :meth:`append` returns has the dtype that it is given."""

    def __init__(self, kind: str, shape: tuple[int, ...], device: torch.device) -> None:
        """``kind``: fp8, int8 or int4; ``shape``: [B, G, T, D]."""
        self.held = [KINDS[kind](shape, device) for _ in range(2)]
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``k`` and ``v`` [B, G, S, D], and return everything stored, dequantized."""
        start, self.length = self.length, self.length + k.shape[2]
        for held, new in zip(self.held, (k, v), strict=False):
            held.write(slice(start, self.length), new)
        found = [held.read(slice(0, self.length), k.dtype) for held in self.held]
        return found[0], found[-1]

    def share(self) -> None:
        """Keep the codes of keys alone."""
        self.held = self.held[:1]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return sum(t.nbytes for held in self.held for t in vars(held).values() if isinstance(t, Tensor))
