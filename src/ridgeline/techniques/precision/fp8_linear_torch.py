"""Linear layers whose products run in float8: e4m3 inputs and weights, e5m2 gradients (arXiv:2209.05433).

Each tensor has one scale, from its current largest magnitude. Where the device multiplies float8 (Ada, Hopper and
later) the product is ``torch._scaled_mm``; elsewhere it is emulated: the operands are dequantized and multiplied in
fp32, which gives the same products of the same rounded numbers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels.dispatch import has_float8
from ridgeline.nn.model.moe import Experts
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.nn.quant.codec import E4M3, E5M2, decode, quantize, quantize_both
from ridgeline.nn.quant.packed_model import BIASES, PackedExperts

_latest: tuple[weakref.ref[Tensor], int, Tensor, Tensor] | None = None
"""The last quantized input, its version, its codes and their factor: layers that read the same tensor share its
codes."""


def _quantized(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and what they are multiplied by (float32 scalar)."""
    codes, _, inverse = quantize_both(t, dtype)
    return codes, inverse


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    global _latest
    if x.is_inference():  # without a version counter a change cannot be detected
        return _quantized(x, E4M3)
    if _latest is not None and _latest[0]() is x and _latest[1] == x._version:
        return _latest[2], _latest[3]

    def forget(ref: Any) -> None:
        global _latest
        if _latest is not None and _latest[0] is ref:
            _latest = None

    with torch.no_grad():
        codes, scale = _quantized(x, E4M3)
    _latest = weakref.ref(x, forget), x._version, codes, scale
    return codes, scale


def product(a: Tensor, by: Tensor, b: Tensor, b_by: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a [m, k] · bᵀ of b [n, k], both float8 codes with their factors, → [m, n] in ``dtype``. ``fast``: sums may be
    kept in fewer bits than fp32 (Hopper's tensor cores otherwise move them to registers)."""
    if has_float8(a.device) and a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0:
        out: Tensor = torch._scaled_mm(a.contiguous(), b.contiguous().t(), scale_a=by, scale_b=b_by, out_dtype=dtype,
                                       use_fast_accum=fast)  # fmt: skip
        return out
    return torch.mm(a.float() * by, (b.float() * b_by).t()).to(dtype)


class _Fp8Linear(torch.autograd.Function):
    """y = x Wᵀ. Saves the quantized input (if the weight trains) and the unquantized weight, which is quantized again
    in backward: a quantized weight kept from forward to backward would outlive what ZeRO-3 frees in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        y = product(codes.flatten(0, -2), scale, *_quantized(weight, E4M3), dtype, fast=True)
        ctx.save_for_backward(weight, *((codes, scale) if weight.requires_grad else ()))
        ctx.x_dtype = x.dtype
        return y.view(*codes.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        shape = dy.shape
        dy_codes, dy_scale = _quantized(dy.flatten(0, -2), E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w_codes, w_scale = _quantized(weight, E4M3)
            dx = product(dy_codes, dy_scale, w_codes.t(), w_scale, ctx.x_dtype).view(*shape[:-1], weight.shape[1])
        if kept:
            x_codes, x_scale = kept
            wide = (getattr(weight, "grad_dtype", None) if weight.is_leaf else None) or weight.dtype
            dw = product(dy_codes.t(), dy_scale, x_codes.flatten(0, -2).t(), x_scale, wide)
        return dx, dw, None, None, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with its three products in float8: x [..., k], weight [n, k] → [..., n] in the compute dtype."""
    dtype = compute_dtype(x)
    y: Tensor = _Fp8Linear.apply(x, weight, *_coded(x), dtype)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(dtype)


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in float8; its parameters are those of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return fp8_linear(x, self.weight, self.bias)


def use_fp8(model: nn.Module) -> list[str]:
    """Make the linear layers of the blocks (``*_proj``, the base of an adapted one, experts) multiply in float8.

    Returns their names.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.removesuffix(".base").endswith("_proj"):
            module.__class__ = Fp8Linear
            names.append(name)
        elif isinstance(module, Experts):
            module.linear = fp8_linear
            names.append(name)
    return names


class StoredFp8Linear(nn.Module):
    """A frozen linear layer stored as e4m3 codes (a byte per weight) with one scale, for inference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = quantize(linear.weight.detach(), E4M3)
        self.codes = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]. Without fp8 units the weight is dequantized, and the input is not quantized."""
        dtype = compute_dtype(x)
        codes = self.codes.view(E4M3)
        if has_float8(x.device):
            y = product(*_coded_rows(x), codes, self.scale.reciprocal(), dtype, fast=True).view(*x.shape[:-1], -1)
        else:
            y = nn.functional.linear(x.to(dtype), decode(codes, self.scale, dtype))
        return y if self.bias is None else y + self.bias.to(dtype)


def store_experts(model: nn.Module) -> None:
    """Store the dense experts of mixtures as :class:`StoredFp8Linear`, one for each projection of each expert."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Experts):
                biases = {bias: getattr(child, bias) for bias in BIASES}
                gate = None if child.gate_proj is None else _stored(child.gate_proj)
                setattr(module, name, PackedExperts(child.activation, gate, _stored(child.up_proj),
                                                    _stored(child.down_proj), biases))  # fmt: skip


def _stored(stack: Tensor) -> list[nn.Module]:
    """The experts' weights [E, out, in] one by one."""
    made: list[nn.Module] = []
    for weight in stack.detach().unbind():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        made.append(StoredFp8Linear(linear))
    return made


def _coded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = _coded(x)
    return codes.flatten(0, -2), scale
