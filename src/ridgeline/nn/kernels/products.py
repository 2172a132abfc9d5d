"""Products in fp32 on CPUs of other makers than Intel, by oneDNN.

PyTorch computes them with MKL, which is made for Intel's. On a core of an AMD EPYC (Zen 4) oneDNN takes 0.70 to 0.92
of MKL's time (``benchmarks/cpu_products.py``); only gradients of weights, whose operands would have to be copied, are
slower. Other dtypes go to oneDNN in any case.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

LARGE, MANY = 1 << 21, 1 << 26
"""Numbers of a weight, or products with it, from which oneDNN is asked: its first product of a shape takes half a
millisecond longer, and each of them some microseconds."""


@lru_cache(maxsize=1)
def by_onednn() -> bool:
    """Whether oneDNN computes products in fp32 here."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _maker() != "GenuineIntel"


def _maker() -> str:
    """The processor's maker, as Linux names it; elsewhere taken to be Intel."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "GenuineIntel")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., k], weight [n, k] → [..., n]."""
    if torch.compiler.is_compiling() or not by_onednn() or not _suits(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_w, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (need_x, need_w, need_b) = ctx.saved_tensors, ctx.needs_input_grad
        rows = d.reshape(-1, d.shape[-1])
        return (linear(d, weight.t()) if need_x else None,
                rows.t() @ x.reshape(-1, x.shape[-1]) if need_w else None,
                rows.sum(0) if need_b else None)  # fmt: skip


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = [t for t in (x, weight, bias) if t is not None]
    if not all(
        type(t) in (Tensor, nn.Parameter) and t.dtype is torch.float32 and t.device.type == "cpu" for t in given
    ):
        return False
    if x.dim() < 2 or torch.is_autocast_enabled("cpu"):
        return False
    if _get_current_dispatch_mode() is not None:  # which knows PyTorch's operators: it counts, traces or places them
        return False
    size = weight.numel()
    return size >= LARGE or size * (x.numel() // x.shape[-1]) >= MANY


def choose_products(model: nn.Module) -> None:
    """Have the plain linear layers of ``model`` compute :func:`linear`, where oneDNN is the faster."""
    if by_onednn():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_forward, module)  # type: ignore[method-assign]


def choose_plain_products(model: nn.Module) -> None:
    """Undo :func:`choose_products`, for a compiler: it chooses products itself, and traces layers of one kind once."""
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), partial) and forward.func is _forward:
            del module.forward


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if type(module) is not nn.Linear:  # a technique has changed it
        return type(module).forward(module, x)
    return linear(x, module.weight, module.bias)
