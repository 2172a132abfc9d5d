"""Number formats that are narrower than arithmetic: how tensors are coded in them, and back.

Float8 with one scale per tensor (arXiv:2209.05433): e4m3 for values and weights, e5m2 for gradients of activations. A
code is ``value · scale`` rounded to the format; dividing by the scale decodes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.float16: 65504.0}
"""Largest finite value of each format."""


def scale_for(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor (float32, shaped as ``peak``) that brings the largest magnitude ``peak`` to the format's largest.

    1 where the peak is zero; NaN where it is not finite, so that an overflow shows in everything that is decoded.
    At most 2^60, so that products of two factors stay finite.
    """
    peak = peak.float()
    factor = torch.where(peak > 0, (LARGEST[dtype] / peak).clamp(max=2.0**60), torch.ones_like(peak))
    return factor.masked_fill(~torch.isfinite(peak), float("nan"))


def peak_of(t: Tensor) -> Tensor:
    """Largest magnitude of a tensor (float32 scalar); zero for an empty one. NaN if it holds any."""
    if not t.numel():
        return torch.zeros((), device=t.device)
    low, high = torch.aminmax(t)
    return torch.maximum(-low, high).float()


def encode(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``t · scale`` rounded to nearest in ``dtype``; finite values saturate at its largest."""
    most = LARGEST[dtype]
    return (t.float() * scale).clamp_(-most, most).to(dtype)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes → values in ``dtype``."""
    return codes.to(torch.float32).div_(scale).to(dtype)


def quantise(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of ``t`` in ``dtype`` with a scale of its own (float32 scalar): (codes, scale)."""
    scale = scale_for(peak_of(t), dtype)
    return encode(t, scale, dtype), scale
