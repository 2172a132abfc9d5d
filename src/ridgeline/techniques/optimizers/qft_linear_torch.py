"""Training with integers only (QFT, arXiv:2310.07147): weights, gradients and Lion's momentum are int8 codes.

A matrix [out, in] has one scale per row. Its largest 1 % of weights stay fp32, in a list beside the codes (the paper's
hybrid quantizer). In the backward pass a layer's weight gradient is quantized as soon as it is known, updates momentum
and weights, and is freed: one layer's gradient exists at a time. Updated weights and momentum are rounded
stochastically, so that steps far smaller than a quantization step still count on average: rounding to nearest would
drop every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels.dispatch import on_gpu
from ridgeline.nn.quant.quantized import QuantizedLinear

if TYPE_CHECKING:
    from ridgeline.nn.model.own_kernels import Both

OUTLIERS = 0.01
"""Fraction of each row that stays fp32."""
_TOP = 127


def at_once(device: str) -> int:
    """How many weights are updated at once on a kind of device: their temporaries should fit into a CPU's caches."""
    return 1 << 13 if device == "cpu" else 1 << 23


_HEADROOM = 17 / 16
"""Factor by which a row's scale grows beyond what is needed when a code would overflow."""


def outliers_of(width: int) -> int:
    """How many weights of a row of ``width`` stay fp32."""
    return max(1, round(OUTLIERS * width))


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round each number to one of its two neighboring integers, with the number itself as the expected value (in
    place)."""
    return x.add_(torch.rand(x.shape, generator=generator, device=x.device)).floor_()


def _peak(x: Tensor) -> Tensor:
    """Each row's largest magnitude [rows, 1], divided by the largest code; never zero."""
    return x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / _TOP


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes (rounded to nearest) and the scale of each row, fp32 [rows, 1]."""
    scale = _peak(x)
    return (x / scale).round_().to(torch.int8), scale


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """What a matrix [out, in] is stored as: int8 ``codes``, fp32 ``scale`` [out, 1], and ``outliers`` (fp32 [out, k])
    at ``columns`` (int32 [out, k]), where codes are zero."""
    w = weight.detach().float()
    columns = w.abs().topk(outliers_of(w.shape[1]), 1).indices
    outliers = w.gather(1, columns)
    codes, scale = encode_rows(w.scatter(1, columns, 0.0))
    return {"codes": codes, "scale": scale, "columns": columns.int(), "outliers": outliers}


def expand(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights [..., in] in ``dtype`` from rows of codes, scale, columns and outliers."""
    codes, scale, columns, outliers = parts
    if by_kernels(codes, scale, columns, outliers) and dtype != torch.float64:
        return _expand_by_kernel((codes, scale, columns, outliers), dtype)
    return _expand_by_operators((codes, scale, columns, outliers), dtype)


def _expand_by_operators(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    codes, scale, columns, outliers = parts
    whole = torch.mul(codes, scale.to(dtype))
    return whole.scatter_(-1, columns.long(), outliers.to(dtype))


def _expand_by_kernel(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    from ridgeline.nn.kernels.integer_rows import Rows, expand_rows

    out = torch.empty(parts[0].shape, dtype=dtype, device=parts[0].device)
    expand_rows(Rows(*(t.view(-1, t.shape[-1]) for t in parts)), out)
    return out


def by_kernels(*tensors: Tensor) -> bool:
    """Whether our kernels compute with these: on a GPU."""
    return on_gpu(*tensors) and tensors[0].numel() > 0 and _is_right(tensors[0].device)


def _is_right(device: torch.device) -> bool:
    from ridgeline.nn.model import own_kernels

    return own_kernels.is_right("integer matrices and their updates", device, trial)


Update = Callable[["IntegerWeight", Tensor], None]
"""Takes a matrix and its gradient [out, in]."""


class IntegerWeight(nn.Module):
    """Base of the integer layers: their stored parameters, and the callback for gradients."""

    codes: nn.Parameter
    scale: nn.Parameter
    columns: nn.Parameter
    outliers: nn.Parameter
    update: Update

    def parts(self) -> tuple[Tensor, ...]:
        """Codes, scale, columns and outliers, in this order."""
        return self.codes, self.scale, self.columns, self.outliers

    def anchor(self) -> Tensor:
        """A tensor that requires a gradient: codes cannot, but their backward must run."""
        return torch.zeros((), device=self.codes.device, requires_grad=torch.is_grad_enabled())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: IntegerWeight, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parts)
        ctx.layer = layer
        return F.linear(x, expand(parts, dtype=x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        dx = grad @ expand(parts, dtype=grad.dtype) if ctx.needs_input_grad[0] else None
        ctx.layer.update(ctx.layer, grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))
        return dx, None, None, *(None for _ in parts)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, layer: IntegerWeight) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer = layer
        return expand((p[ids] for p in layer.parts()), torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        dw = grad.new_zeros(ctx.layer.codes.shape)
        dw.index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]))
        ctx.layer.update(ctx.layer, dw)
        return None, None, None


class IntegerLinear(QuantizedLinear, IntegerWeight):
    """A trainable linear layer in integers. Its bias, if any, stays fp32."""

    stored = ("codes", "scale", "columns", "outliers")

    def __init__(self, linear: nn.Linear, update: Update) -> None:
        super().__init__(linear)
        self.keep(**quantize(linear.weight))
        self.update = update

    @staticmethod
    def expand(*stored: Tensor, dtype: torch.dtype) -> Tensor:
        """See :func:`expand`."""
        return expand(stored, dtype)

    def product(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], without the bias."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self.anchor(), self, *self.parts())  # type: ignore[no-untyped-call]
        return y


class IntegerEmbedding(IntegerWeight):
    """A trainable embedding table in integers."""

    def __init__(self, table: nn.Embedding, update: Update) -> None:
        super().__init__()
        for name, t in quantize(table.weight).items():
            setattr(self, name, nn.Parameter(t, requires_grad=False))
        self.num_embeddings = table.num_embeddings
        self.update = update

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] → vectors [..., width]."""
        y: Tensor = _LookUp.apply(ids, self.anchor(), self)  # type: ignore[no-untyped-call]
        return y


def lion_rows(layer: IntegerWeight, rows: slice, gradient: Tensor, momentum: Tensor, momentum_scale: Tensor, *,
              lr: float, decay: float, betas: tuple[float, float], generator: torch.Generator) -> None:  # fmt: skip
    """Lion's step on some rows (arXiv:2302.06675, algorithm 2): u = sign(β1 m + (1 - β1) g), w ← w - lr (u + λ w),
    m ← β2 m + (1 - β2) g; weights and momentum are rounded stochastically to their codes."""
    m = torch.mul(momentum, momentum_scale)
    step = torch.lerp(gradient, m, betas[0]).sign_().mul_(-lr)
    m.lerp_(gradient, 1 - betas[1])
    torch.clamp_min(m.abs().amax(-1, keepdim=True), 1e-30, out=momentum_scale).div_(_TOP)
    momentum.copy_(stochastic_round(m.div_(momentum_scale), generator).clamp_(-_TOP, _TOP))
    del m, gradient
    codes, scale = layer.codes[rows], layer.scale[rows]
    columns, outliers = layer.columns[rows].long(), layer.outliers[rows]
    outliers.mul_(1 - lr * decay).add_(step.gather(1, columns))
    moved = torch.mul(codes, 1 - lr * decay).add_(step.div_(scale)).scatter_(1, columns, 0.0)
    needed = moved.abs().amax(-1, keepdim=True) / _TOP
    grow = torch.where(needed > 1, needed * _HEADROOM, 1.0)
    scale.mul_(grow)
    codes.copy_(stochastic_round(moved.div_(grow), generator).clamp_(-_TOP, _TOP))
    codes.scatter_(1, columns, 0)


def lion_rows_by_kernel(
    layer: IntegerWeight, rows: slice, gradient: Tensor, momentum: Tensor, momentum_scale: Tensor, *, lr: float,
    decay: float, betas: tuple[float, float], generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """:func:`lion_rows` in one kernel, with the same random numbers, of a gradient that it rounds to codes itself;
    returns the sum of its squares (fp64, on its device)."""
    from ridgeline.nn.kernels import integer_rows as kernel

    held = kernel.Rows(*(part.detach()[rows] for part in layer.parts()))
    first, second = (torch.rand(held.codes.shape, generator=generator, device=held.codes.device) for _ in range(2))
    numbers = lr, 1 - lr * decay, 1 - betas[0], 1 - betas[1], _HEADROOM
    squares = kernel.lion_rows(held, gradient.contiguous(), momentum, momentum_scale, (first, second), numbers)
    return squares.sum(dtype=torch.float64)


def trial(device: torch.device) -> Both:
    """A small matrix, its momentum and the squares of its gradients behind three of Lion's steps, of which the second
    is so long that scales grow."""
    g = torch.Generator(device).manual_seed(0)
    linear = nn.Linear(300, 40, bias=False, device="meta")  # which draws none of the process's random numbers
    weight, *grads = (torch.randn(40, 300, generator=g, device=device) for _ in range(4))
    linear.weight = nn.Parameter(weight)

    def found(kernel: bool) -> tuple[Tensor, ...]:
        layer = IntegerLinear(linear, lambda *_: None)
        momentum, scale = torch.zeros_like(layer.codes), torch.zeros_like(layer.scale)
        random, squares = torch.Generator(device).manual_seed(1), torch.zeros((), dtype=torch.float64, device=device)
        for lr, grad in zip((0.01, 2.0, 0.01), grads, strict=True):
            how: dict[str, Any] = {"lr": lr, "decay": 0.1, "betas": (0.9, 0.99), "generator": random}
            if kernel:
                squares += lion_rows_by_kernel(layer, slice(None), grad, momentum, scale, **how)
            else:
                codes, by = encode_rows(grad)
                squares += grad.double().square().sum()
                lion_rows(layer, slice(None), torch.mul(codes, by), momentum, scale, **how)
        parts = [p.detach() for p in layer.parts()]
        whole = (_expand_by_kernel if kernel else _expand_by_operators)(parts, torch.float32)
        return whole, momentum * scale, squares

    return lambda: found(True), lambda: found(False)
