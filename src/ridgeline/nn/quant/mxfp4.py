"""MXFP4: E2M1 codes in blocks of 32 that share a power of two (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 … 7 stand for; 8 … 15 are their negatives."""
_BIAS = 127


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights [..., out, in] from codes uint8 [..., out, in / 32, 16], two a byte with the first in the low bits, and
    exponents uint8 [..., out, in / 32]. Exact in bf16, fp32 and fp64."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=dtype, device=blocks.device)
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    factor = torch.ldexp(torch.ones((), device=scales.device), scales.int() - _BIAS).to(dtype)
    return values.mul_(factor.unsqueeze(-1)).flatten(-2)
