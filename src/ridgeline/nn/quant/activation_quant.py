"""How a layer's input is quantized at inference, and the same computed in floating point.

With the dequantized weight, ``F.linear(fake_quantize(x, code), weight)`` is what an int8 kernel gives, up to summation
order: products of integers times the scales of row and column. This also holds for the mixed decomposition of LLM.int8,
as its full-precision part multiplies the same dequantized weights (arXiv:2208.07339, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputCode:
    """How a layer's input is quantized at inference; a layer without one has only quantized weights."""

    bits: int = 8
    scale: float | None = None
    """Scale of the whole input, calibrated; None: per token, at run time (largest magnitude / (2^(bits-1) - 1))."""
    threshold: float = 0.0
    """Inputs (columns of what the layer reads) in which any value has at least this magnitude are computed in full
    precision (LLM.int8); 0: none."""


class Coded(NamedTuple):
    """Quantized inputs [..., in]."""

    codes: Tensor
    """[..., in] whole numbers of at most 2^(bits-1) - 1, in the dtype of the inputs; 0 where an input is wide."""
    scale: Tensor
    """Scale: [..., 1] per token, or a scalar."""
    wide: Tensor | None
    """bool [in]: inputs that are computed in full precision; None: none can be."""


def code_input(x: Tensor, code: InputCode) -> Coded:
    """``x`` [..., in] rounded to integers."""
    top = 2 ** (code.bits - 1) - 1
    wide = None
    if code.threshold and x.numel():  # an expert may have no rows
        wide = x.abs().reshape(-1, x.shape[-1]).amax(0) >= code.threshold
        x = x.masked_fill(wide, 0)
    if code.scale is None:
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny) / top
    else:
        scale = torch.full((), code.scale, dtype=x.dtype, device=x.device)
    return Coded(torch.round(x / scale).clamp_(-top, top), scale, wide)


def fake_quantize(x: Tensor, code: InputCode) -> Tensor:
    """Replaces ``x`` [..., in] by quantized and dequantized values, in the dtype of ``x``.

    Gradients ignore the rounding (straight-through).
    """
    values = x.detach()
    codes, scale, wide = code_input(values, code)
    rounded = codes.mul_(scale)
    if wide is not None:
        rounded = torch.where(wide, values, rounded)
    return rounded if not x.requires_grad else x + (rounded - values)
