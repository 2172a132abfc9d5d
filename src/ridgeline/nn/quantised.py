"""Linear layers stored as int8 or packed int4 codes with symmetric scales, expanded to the input's dtype per use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.nn.collectives import local


def quantise(weight: torch.Tensor, bits: int, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Round-to-nearest symmetric codes of ``weight`` [out, in].

    Returns (codes, scales): int8 codes [out, in], or for 4 bits two codes a byte as uint8 [out, in/2] (low half first);
    fp32 scales [out, groups], scale = max |w| / (2^(bits-1) - 1) over each group of the row.
    """
    out, width = weight.shape
    group = group_size or width
    top = 2 ** (bits - 1) - 1
    grouped = weight.float().reshape(out, width // group, group)
    scales = grouped.abs().amax(-1).clamp_min(1e-12) / top
    codes = (grouped / scales[..., None]).round_().clamp_(-top, top).to(torch.int8).reshape(out, width)
    if bits == 4:
        shifted = (codes + 8).to(torch.uint8)
        codes = shifted[:, ::2] | (shifted[:, 1::2] << 4)
    return codes, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The inverse of :func:`quantise`: weights [out, in] in ``dtype``."""
    if codes.dtype == torch.uint8:
        low, high = (codes & 15).to(torch.int8) - 8, (codes >> 4).to(torch.int8) - 8
        codes = torch.stack((low, high), -1).flatten(-2)
    out, width = codes.shape
    groups = scales.shape[1]
    if groups == 1:
        return torch.mul(codes, scales).to(dtype)
    return torch.mul(codes.reshape(out, groups, width // groups), scales[..., None]).reshape(out, width).to(dtype)


class _QuantisedMatmul(torch.autograd.Function):
    """x · Wᵀ keeping only the codes: the weight is expanded again for the input gradient."""

    @staticmethod
    def forward(ctx, x, codes, scales):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(codes, scales)
        return F.linear(x, dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        codes, scales = ctx.saved_tensors
        return grad @ dequantise(codes, scales, grad.dtype), None, None


class QuantisedLinear(nn.Module):
    """A frozen linear layer in integer codes.

    Codes and scales are plain parameters without gradient, so that anything that shards parameters shards them along
    whole rows.
    """

    def __init__(self, linear: nn.Linear, bits: int, group_size: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, bits
        self.dtype = linear.weight.dtype
        codes, scales = quantise(linear.weight.detach(), bits, group_size)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out], without the bias."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: torch.Tensor = _QuantisedMatmul.apply(x, local(self.codes), local(self.scales))  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]."""
        y = self.product(x)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)


def expanded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's state with weights in the place of codes and scales."""
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "codes":
            out[f"{prefix}.weight"] = dequantise(value, state[f"{prefix}.scales"])
        elif leaf != "scales":
            out[name] = value
    return out


def quantise_linears(model: nn.Module, bits: int, group_size: int = 0) -> list[str]:
    """Replace the ``*_proj`` linears inside the model's layers; returns their names."""
    replaced: list[str] = []
    for name, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            if leaf.endswith("_proj") and isinstance(child, nn.Linear):
                setattr(module, leaf, QuantisedLinear(child, bits, group_size))
                replaced.append(f"{name}.{leaf}")
    return replaced
