"""Binary-coding quantization: a group of weights w ≈ Σ α_i b_i with b_i in {-1, +1} (AlphaTuning, arXiv:2210.03858).

Groups lie within rows. The fit is greedy (one sign vector after the other from what is left), then alternating: the
scales by least squares for the signs as they are, then each weight to the nearest of its group's 2^q sums; neither step
can raise the error (arXiv:1802.00150). Signs are packed, one bit per weight and plane.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.quant.quantized import QuantizedLinear

ROUNDS = 15
"""Default number of alternations."""
_AT_ONCE = 1 << 16
"""Number of weights that are fitted, or expanded, at once on a CPU."""


def moved(bits: int) -> float:
    """Memory traffic in bytes of expanding one weight to fp32: its signs are read, every plane passes over the sum."""
    return bits / 8 + 8.0 * bits - 4.0


def _greedy(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Signs [groups, size, bits] and scales [groups, bits] of ``w`` [groups, size]."""
    left, signs, scales = w.clone(), [], []
    for _ in range(bits):
        b = torch.where(left < 0, -1.0, 1.0).to(w.dtype)
        a = left.abs().mean(1, keepdim=True)
        left -= a * b
        signs.append(b)
        scales.append(a)
    return torch.stack(signs, -1), torch.cat(scales, 1)


def _scales(w: Tensor, signs: Tensor) -> Tensor:
    """Least-squares scales [groups, bits]; planes that coincide share one (least norm)."""
    normal = signs.mT @ signs
    right = signs.mT @ w.unsqueeze(-1)
    scales: Tensor = torch.linalg.pinv(normal, hermitian=True) @ right
    return scales.squeeze(-1)


def _nearest(w: Tensor, scales: Tensor) -> Tensor:
    """The signs [groups, size, bits] of the sum that is nearest to each weight."""
    bits = scales.shape[1]
    choices = torch.arange(1 << bits, device=w.device)
    table = ((choices.unsqueeze(1) >> torch.arange(bits, device=w.device)) & 1).to(w.dtype) * 2 - 1
    sums, order = (scales @ table.T).sort(1)
    at = torch.searchsorted(((sums[:, 1:] + sums[:, :-1]) / 2).contiguous(), w)
    return table[order.gather(1, at)]


def _error(w: Tensor, signs: Tensor, scales: Tensor) -> Tensor:
    return (w - (signs @ scales.unsqueeze(-1)).squeeze(-1)).square().sum(1)


@torch.no_grad()
def fit(weight: Tensor, bits: int, group_size: int = 0, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Signs and scales of ``weight`` [out, in]: ±1 as int8 [out, in, bits], and fp32 [out, groups, bits].

    ``group_size`` 0: the whole row. Within a group the largest scale comes first; none is negative.
    """
    rows, width = weight.shape
    size = group_size or width
    all_signs = torch.empty(rows, width, bits, dtype=torch.int8, device=weight.device)
    all_scales = torch.empty(rows, width // size, bits, device=weight.device)
    step = max(1, _AT_ONCE // width)
    if weight.is_meta:  # shapes only
        return all_signs, all_scales
    for at in range(0, rows, step):
        w = weight[at : at + step].double().reshape(-1, size)
        signs, scales = _greedy(w, bits)
        error = _error(w, signs, scales)
        for _ in range(rounds):
            new_scales = _scales(w, signs)
            new_signs = _nearest(w, new_scales)
            new_error = _error(w, new_signs, new_scales)
            better = new_error < error
            if not better.any():
                break
            signs = torch.where(better[:, None, None], new_signs, signs)
            scales = torch.where(better[:, None], new_scales, scales)
            error = torch.where(better, new_error, error)
        order = scales.abs().argsort(1, descending=True)
        scales = scales.gather(1, order)
        signs = signs.gather(2, order.unsqueeze(1).expand_as(signs)) * scales.sign().unsqueeze(1).where(
            scales.unsqueeze(1) != 0, 1
        )
        all_scales[at : at + step] = scales.abs().view(-1, width // size, bits)
        all_signs[at : at + step] = signs.view(-1, width, bits)
    return all_signs, all_scales


def pack(signs: Tensor) -> Tensor:
    """±1 [out, in, bits] → uint8 [out, bits, in/8], the first of eight weights in the lowest bit."""
    rows, width, bits = signs.shape
    ones = (signs.movedim(2, 1) > 0).view(rows, bits, width // 8, 8).to(torch.uint8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=signs.device)).sum(-1, dtype=torch.uint8)


@lru_cache(maxsize=4)
def _eights(device: torch.device) -> Tensor:
    """The eight signs of each byte, fp32 [256, 8]."""
    byte = torch.arange(256).unsqueeze(1)
    return (((byte >> torch.arange(8)) & 1) * 2.0 - 1.0).to(device)


def unpack(plane: Tensor) -> Tensor:
    """uint8 [rows, in/8] → ±1 as fp32 [rows, in]."""
    return _eights(plane.device).index_select(0, plane.reshape(-1).int()).view(len(plane), -1)


def expand(planes: Tensor, alpha: Tensor, rest: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [out, in] in ``dtype`` from packed ``planes``, the first scales [out, groups] and the ``rest`` of them
    [out, groups, bits - 1]."""
    rows, bits, eighths = planes.shape
    width, groups = 8 * eighths, alpha.shape[1]
    out = torch.empty(rows, width, dtype=dtype, device=planes.device)
    scales = torch.cat((alpha.detach().unsqueeze(-1), rest), -1).float()
    step = max(1, _AT_ONCE // width) if planes.device.type == "cpu" else rows
    for at in range(0, rows, step):
        part, some = planes[at : at + step], scales[at : at + step]
        total = unpack(part[:, 0]).view(len(part), groups, -1).mul_(some[..., :1])
        for i in range(1, bits):
            total.addcmul_(unpack(part[:, i]).view(total.shape), some[..., i : i + 1])
        out[at : at + step] = total.view(len(part), width)
    return out


class _Product(torch.autograd.Function):
    """x · Wᵀ that keeps x and the codes: W is expanded again for the input's gradient, and the weight's gradient is
    summed over each group with the signs of the first plane, ∂L/∂α_1 = Σ ∂L/∂W ⊙ b_1 (arXiv:2210.03858, eq. 5)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: Tensor, alpha: Tensor, rest: Tensor) -> Tensor:
        ctx.save_for_backward(x, planes, alpha, rest)
        return F.linear(x, expand(planes, alpha, rest, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, planes, alpha, rest = ctx.saved_tensors
        dx = grad @ expand(planes, alpha, rest, grad.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return dx, None, None, None
        dw = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        d_alpha = torch.empty(alpha.shape, device=alpha.device)
        step = max(1, _AT_ONCE // x.shape[-1]) if x.device.type == "cpu" else len(dw)
        for at in range(0, len(dw), step):
            signed = unpack(planes[at : at + step, 0]).mul_(dw[at : at + step])
            torch.sum(signed.view(len(signed), alpha.shape[1], -1), -1, out=d_alpha[at : at + step])
        return dx, None, d_alpha.to(alpha.dtype), None


class BinaryLinear(QuantizedLinear):
    """A linear layer of which only the first scale of each group (``alpha``) trains. ``in_features``: a multiple of 8.

    ``planes`` are its packed signs, ``rest`` the scales that stay as they are.
    """

    stored = ("planes", "alpha", "rest")

    def __init__(self, linear: nn.Linear, bits: int, group_size: int = 0, rounds: int = ROUNDS) -> None:
        super().__init__(linear)
        signs, scales = fit(linear.weight.detach(), bits, group_size, rounds)
        self.keep(planes=pack(signs), rest=scales[..., 1:].contiguous())
        self.alpha = nn.Parameter(scales[..., 0].clone())

    @staticmethod
    def expand(*stored: Tensor, dtype: torch.dtype) -> Tensor:
        """See :func:`expand`."""
        planes, alpha, rest = stored
        return expand(planes, alpha, rest, dtype)

    def product(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], without the bias."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, *self.held())  # type: ignore[no-untyped-call]
        return y
