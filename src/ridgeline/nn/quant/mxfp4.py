"""MXFP4: E2M1 codes in blocks of 32 that share a power of two (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.nn.quant.packed import E2M1, E8M0_BIAS, Packed

BLOCK = 32
"""Inputs that share a scale."""
_LARGEST = 2
"""The exponent of the largest number, 6."""


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights [..., out, in] from codes uint8 [..., out, in / 32, 16], two a byte with the first in the low bits, and
    exponents uint8 [..., out, in / 32]. Exact in bf16, fp32 and fp64."""
    table = E2M1.to(blocks.device, dtype)
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    one = torch.ones(scales.shape, device=scales.device)
    factor = torch.ldexp(one, scales.int() - E8M0_BIAS).to(dtype)
    return values.mul_(factor.unsqueeze(-1)).flatten(-2)


def packed(blocks: Tensor, scales: Tensor) -> Packed:
    """The record of a weight [out, in] in these blocks, as in :func:`expand`."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return Packed(codes, scales.contiguous(), None, 4, BLOCK, floating=True)


def quantized(weight: Tensor) -> Packed:
    """A weight [out, in] rounded to the nearest numbers, ties to even; the exponent of a block's scale is that of its
    largest magnitude, less 2, and what is larger than 6 times the scale becomes that (section 6.3 of the
    specification)."""
    out, width = weight.shape
    grouped = weight.float().view(out, -1, BLOCK)
    peak = grouped.abs().amax(-1)
    exponent = (torch.frexp(peak).exponent - 1 - _LARGEST).clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where(peak > 0, exponent, torch.zeros_like(exponent))
    ratio = torch.ldexp(grouped, -exponent.unsqueeze(-1))
    size, numbers = ratio.abs().clamp_(max=float(E2M1[7])), E2M1[:8].to(weight.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    code = torch.bucketize(size, middles)  # a tie goes to the lower neighbor, and to the upper where that is even
    tied = (size.unsqueeze(-1) == middles).any(-1)
    code += tied & (code % 2 == 1)
    codes = (code + 8 * (ratio < 0)).to(torch.uint8).view(out, width)
    scale = (exponent + E8M0_BIAS).to(torch.uint8)
    return Packed(codes, scale, None, 4, BLOCK, floating=True)
