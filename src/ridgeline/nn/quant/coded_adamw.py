"""AdamW's step where both moments are one-byte codes of blocks (arXiv:2110.02861): one kernel on a GPU, PyTorch's
operators elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ridgeline.nn.kernels.dispatch import on_gpu, usable
from ridgeline.nn.quant.codec import decode_blockwise8, dynamic_map, encode_blockwise8, search_tables

if TYPE_CHECKING:
    from ridgeline.nn.model.own_kernels import Both


class Numbers(NamedTuple):
    """What a step of AdamW is made with."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    step: int
    """1, 2, …"""

    def of_kernel(self) -> tuple[float, ...]:
        """See :func:`~ridgeline.nn.kernels.coded_adamw.coded_adamw`."""
        return (1 - self.lr * self.decay, 1 - self.beta1, self.beta2, 1 - self.beta2, self.eps,
                -self.lr / (1 - self.beta1**self.step), (1 - self.beta2**self.step) ** 0.5)  # fmt: skip


class Moment(NamedTuple):
    """Codes (uint8, shaped as the parameter) and the largest magnitude of each block (fp32, as many as blocks)."""

    codes: Tensor
    peaks: Tensor


def apply(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, n: Numbers) -> None:
    """m ← β₁ m + (1 - β₁) g;  v ← β₂ v + (1 - β₂) g²;  p ← p - η λ p - η m̂ / (√v̂ + ε), in place; moments are fp32."""
    m.lerp_(grad, 1 - n.beta1)
    v.mul_(n.beta2).addcmul_(grad, grad, value=1 - n.beta2)
    weight.mul_(1 - n.lr * n.decay)
    size = (v.sqrt() / (1 - n.beta2**n.step) ** 0.5).add_(n.eps)
    weight.add_((m / size).to(weight.dtype), alpha=-n.lr / (1 - n.beta1**n.step))


def apply_coded(weight: Tensor, grad: Tensor, m: Moment, v: Moment, block: int, n: Numbers) -> None:
    """The same with moments in codes of blocks of ``block``: the first signed, the second not."""
    if on_gpu(weight, *m, *v) and usable(weight, grad) and _is_right(weight.device):
        if weight.numel():
            _by_kernel(weight, grad, m, v, block, n)
    else:
        _by_operators(weight, grad, m, v, block, n)


def _is_right(device: torch.device) -> bool:
    from ridgeline.nn.model import own_kernels

    return own_kernels.is_right("8-bit AdamW", device, trial)


def _by_operators(weight: Tensor, grad: Tensor, m: Moment, v: Moment, block: int, n: Numbers) -> None:
    first, second = (decode_blockwise8(held.codes, held.peaks.view(-1), held is m, block) for held in (m, v))
    apply(weight, grad.float(), first, second, n)
    for held, value in ((m, first), (v, second)):
        codes, peaks = encode_blockwise8(value, held is m, block)
        held.codes.copy_(codes)
        held.peaks.view(-1).copy_(peaks)


def _by_kernel(weight: Tensor, grad: Tensor, m: Moment, v: Moment, block: int, n: Numbers) -> None:
    from ridgeline.nn.kernels.coded_adamw import coded_adamw

    tables = [t for signed in (True, False)
              for t in (dynamic_map(signed, weight.device), *search_tables(signed, weight.device))]  # fmt: skip
    coded_adamw(weight, grad.contiguous(), m, v, tuple(tables), block, n.of_kernel())


def trial(device: torch.device) -> Both:
    """What three steps change of a matrix whose blocks are of no power of two, and its decoded moments."""
    g = torch.Generator(device).manual_seed(0)
    start = torch.randn(20, 480, generator=g, device=device)
    grads = [torch.randn(start.shape, generator=g, device=device) * scale for scale in (1.0, 1e-3, 1.0)]

    def found(kernel: bool) -> tuple[Tensor, ...]:
        weight = start.clone()
        m, v = (Moment(*encode_blockwise8(torch.zeros_like(weight), signed, 160)) for signed in (True, False))
        for step, grad in enumerate(grads, 1):
            given = weight, grad, m, v, 160, Numbers(0.1, 0.9, 0.95, 1e-8, 0.1, step)
            (_by_kernel if kernel else _by_operators)(*given)
        return weight - start, *(decode_blockwise8(*held, held is m, 160) for held in (m, v))

    return lambda: found(True), lambda: found(False)
