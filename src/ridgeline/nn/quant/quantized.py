"""Linear layers with quantized weights, dequantized to the input's dtype on use: int8, packed int4 and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from ridgeline.nn.kernels.products import linear
from ridgeline.nn.parallel.collectives import local


def quantize(weight: torch.Tensor, bits: int, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
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


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The inverse of :func:`quantize`: weights [out, in] in ``dtype``."""
    if codes.dtype == torch.uint8:
        low, high = (codes & 15).to(torch.int8) - 8, (codes >> 4).to(torch.int8) - 8
        codes = torch.stack((low, high), -1).flatten(-2)
    out, width = codes.shape
    groups = scales.shape[1]
    if groups == 1:
        return torch.mul(codes, scales).to(dtype)
    return torch.mul(codes.reshape(out, groups, width // groups), scales[..., None]).reshape(out, width).to(dtype)


class _ExpandedMatmul(torch.autograd.Function):
    """x · Wᵀ that saves only the stored form of W: it is expanded again for the input gradient."""

    @staticmethod
    def forward(ctx, x, expand, *stored):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*stored)
        ctx.expand = expand
        return linear(x, expand(*stored, dtype=x.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        stored = ctx.saved_tensors  # once: recomputation hands it out once
        return linear(grad, ctx.expand(*stored, dtype=grad.dtype).t()), None, *(None for _ in stored)


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantized weight.

    The weight is stored in plain parameters without gradient whose rows are those of the weight, so that anything that
    shards parameters shards them along whole rows. A subclass adds them in ``__init__`` and defines how to expand them.
    """

    stored: ClassVar[tuple[str, ...]] = ("codes", "scales")
    """Names of the parameters that make up the weight, as ``expand`` takes them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def keep(self, **stored: torch.Tensor) -> None:
        """Register tensors as its frozen parameters."""
        for name, t in stored.items():
            setattr(self, name, nn.Parameter(t, requires_grad=False))

    @staticmethod
    def expand(*stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in] in ``dtype`` from (parts of) the stored tensors."""
        raise NotImplementedError

    def cut_by_input(self, name: str) -> bool:
        """Whether a stored parameter is divided when the weight is divided along its input, or replicated."""
        return True

    def held(self) -> list[torch.Tensor]:
        """This rank's part of the stored tensors."""
        return [local(self.get_parameter(name)) for name in self.stored]

    def dense(self) -> torch.Tensor:
        """The weight [out, in], this rank's part of it."""
        return self.expand(*self.held(), dtype=self.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out], without the bias."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: torch.Tensor = _ExpandedMatmul.apply(x, self.expand, *self.held())  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]."""
        y = self.product(x)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)


class IntLinear(QuantizedLinear):
    """A frozen linear layer in int8 or packed int4 codes with symmetric scales."""

    def __init__(self, linear: nn.Linear, bits: int, group_size: int = 0) -> None:
        super().__init__(linear)
        self.bits = bits
        codes, scales = quantize(linear.weight.detach(), bits, group_size)
        self.keep(codes=codes, scales=scales)

    @staticmethod
    def expand(*stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`dequantize`."""
        codes, scales = stored
        return dequantize(codes, scales, dtype)

    def cut_by_input(self, name: str) -> bool:
        """A whole row's scale applies to every part of it."""
        return name != "scales" or self.get_parameter(name).shape[1] > 1


def expanded(state: dict[str, torch.Tensor], kind: type[QuantizedLinear]) -> dict[str, torch.Tensor]:
    """A model's state with fp32 weights instead of the stored tensors of layers of ``kind``."""
    first = kind.stored[0]
    coded = {n.removesuffix(f".{first}") for n in state if n.endswith(f".{first}")}
    coded = {prefix for prefix in coded if all(f"{prefix}.{part}" in state for part in kind.stored)}
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix not in coded or leaf not in kind.stored:
            out[name] = value
        elif leaf == first:
            parts = (state[f"{prefix}.{part}"] for part in kind.stored)
            out[f"{prefix}.weight"] = kind.expand(*parts, dtype=torch.float32)
    return out


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> list[str]:
    """Replace the ``*_proj`` linears inside the model's layers by ``make(linear)``; returns their names."""
    replaced: list[str] = []
    for name, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            if leaf.endswith("_proj") and isinstance(child, nn.Linear):
                setattr(module, leaf, make(child))
                replaced.append(f"{name}.{leaf}")
    return replaced
