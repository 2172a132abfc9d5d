"""Dense products that PyTorch's choice of library makes slower than they need be.

In fp32 on non-Intel CPUs, by oneDNN: PyTorch computes them with MKL, which is made for Intel's. With one thread of an
AMD EPYC (Zen 4) oneDNN takes 0.70 to 0.95 of MKL's time (``benchmarks/cpu_products.py``). Gradients of weights stay
with MKL: their operands would have to be copied. Other dtypes go to oneDNN in any case.

In 16 bits on CPUs whose units for them are slower than those for fp32, or missing, in fp32
(:mod:`~ridgeline.nn.kernels.widened`).

Of one row in 16 bits on GPUs, in served models, also with weights in float8 codes, by
:mod:`~ridgeline.nn.kernels.gemv`; of more rows with such codes by :mod:`~ridgeline.nn.kernels.lowbit_matmul`; on
Hopper, of rows in codes with such codes, and of a few in 16 bits where that was chosen (:data:`FEW_ROWS`), by
:mod:`~ridgeline.nn.kernels.skinny`.

And what a product of merged projections is: :class:`Product`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.kernels.backends import Kernels
from ridgeline.nn.kernels.dispatch import has_float8, has_triton, is_hopper, note_library, observed
from ridgeline.nn.kernels.peaks import GatedGradient, Wish
from ridgeline.nn.kernels.widened import maker, mm, wide_linear, widened
from ridgeline.spec.lowbit import FLOAT8_ROWS
from ridgeline.spec.lowbit import MANY_ROWS as CODED_ROWS

LARGE, MANY = 1 << 20, 1 << 26
"""Numbers of a weight, or products with it, from which oneDNN is asked: its first product of a shape takes longer, and
each of them some microseconds."""


@lru_cache(maxsize=1)
def by_onednn() -> bool:
    """Whether oneDNN computes products in fp32 here."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and maker() != "GenuineIntel"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., k], weight [n, k] → [..., n]."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if widened() and (y := wide_linear(x, weight, bias)) is not None:
        return y
    if not by_onednn() or not _suits(x, weight, bias) or torch.is_autocast_enabled("cpu") or observed():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        recorded: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return recorded
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    if x.dim() == 2:
        return y
    # Not a view, which no autograd function may return for others to write to; as ``F.linear`` does.
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])  # type: ignore[no-any-return]


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
    """Whether oneDNN, which checks little, computes what ``F.linear`` would, and the operands are large enough."""
    if weight.dim() != 2 or x.dim() < 2:
        return False
    n, k = weight.shape
    if k == 0 or x.shape[-1] != k or (n * k < LARGE and n * x.numel() < MANY):
        return False
    if bias is not None and not (_plain(bias) and bias.shape == (n,) and bias.is_contiguous()):
        return False
    return _plain(x) and _plain(weight)


def _plain(t: Tensor) -> bool:
    return t.is_cpu and t.dtype is torch.float32 and type(t) in (Tensor, nn.Parameter)


class Linear(nn.Linear):
    """``nn.Linear`` that computes :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.linear(input, self.weight, self.bias)
        else:
            return linear(input, self.weight, self.bias)


def served_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of a served model: x [..., k], weight [n, k] → [..., n]."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if _is_row(x, weight, bias):
        from ridgeline.nn.kernels.gemv import product_of_row

        return product_of_row(x, weight, bias)
    if x.device in FEW_ROWS and 0 < x.numel() <= CODED_ROWS * x.shape[-1] and _suits_triton(x, weight, bias):
        return product_of_few_rows(x, weight, bias)
    note_library()
    return F.linear(x, weight, bias)


FEW_ROWS: set[torch.device] = set()
"""GPUs of Hopper's architecture on which served models multiply a few rows by our kernel, not by PyTorch's."""


def product_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of x [..., k] of up to 128 rows in 16 bits and weight [n, k] → [..., n], by our kernel."""
    from ridgeline.nn.kernels.skinny import product_of_rows

    arrived = getattr(weight, "arrived", None)
    if (
        arrived is None or arrived.device != weight.device
    ):  # with the weight, as steps that run at one time need counters of their own
        arrived = torch.zeros(-(-len(weight) // 64), dtype=torch.int32, device=weight.device)
        weight.arrived = arrived  # type: ignore[attr-defined]
    return product_of_rows(x.reshape(-1, x.shape[-1]), weight, arrived, bias).view(*x.shape[:-1], len(weight))


def served_gated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """SwiGLU of :func:`served_linear`, weight [2 · f, k] → [..., f], in one launch; None: not of this many rows."""
    if torch.compiler.is_compiling() or not _is_row(x, weight, bias):
        return None
    from ridgeline.nn.kernels.gemv import product_of_row

    return product_of_row(x, weight, bias, gated=True)


def product_of_codes(
    x: Tensor, codes: Tensor, scales: Tensor, arrived: Tensor, bias: Tensor | None, gated: bool = False
) -> Tensor | None:
    """x [..., k] in 16 bits times e4m3 ``codes`` [n, k] that ``scales`` (fp32 [n, 1]) are to be multiplied by, plus
    ``bias`` [n] → [..., n]; or, of one row, SwiGLU of that (``gated``) → [..., n / 2]. Inputs are not rounded.
    ``arrived`` as of :func:`~ridgeline.nn.kernels.lowbit_matmul.lowbit_product`. None: not of this many rows, as the
    device multiplies float8, or not on a GPU."""
    if torch.compiler.is_compiling() or not _suits_triton(x, codes, bias, scales):
        return None
    if x.shape[-1] == x.numel():
        from ridgeline.nn.kernels.gemv import product_of_row

        return product_of_row(x, codes, bias, gated, scales)
    if gated or not x.numel() or (x.numel() > FLOAT8_ROWS * x.shape[-1] and has_float8(x.device)):
        return None
    from ridgeline.nn.kernels.lowbit_matmul import float8_product

    return float8_product(x.reshape(-1, x.shape[-1]), codes, scales, arrived, bias).view(*x.shape[:-1], len(codes))


def product_of_both_codes(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, arrived: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """e4m3 codes ``x`` [m, k] times ``codes`` [n, k] that ``x_scales`` [m, 1] and ``scales`` [n, 1] (fp32) are to be
    multiplied by, plus ``bias`` [n] → [m, n] in ``dtype``. ``arrived`` as above. Nothing is recorded. None: not of this
    many rows, not in this dtype, of a weight whose sides are no multiples of 16, or not on Hopper."""
    suits = (
        not torch.compiler.is_compiling()
        and 0 < len(x) <= CODED_ROWS
        and dtype in (torch.bfloat16, torch.float16)
        and codes.numel() > 0
        and all(size % 16 == 0 for size in codes.shape)
        and is_hopper(x.device)
        and _for_triton(x, x_scales, codes, scales, *(() if bias is None else (bias,)))
        and all(t.is_contiguous() for t in (x, x_scales, codes, scales))
    )
    if not suits:
        return None
    from ridgeline.nn.kernels.skinny import product_of_coded_rows

    return product_of_coded_rows(x, x_scales, codes, scales, arrived, dtype, bias)


def _is_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel for one row computes it."""
    return x.shape[-1] == x.numel() and _suits_triton(x, weight, bias)  # first what most are not


def _suits_triton(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> bool:
    """Whether our kernels for few rows can read this, and nothing is recorded. Looks at shapes alone, not at data."""
    given = (x, weight) if bias is None else (x, weight, bias)
    kind = x.dtype if scales is None else torch.float8_e4m3fn
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.requires_grad or not _for_triton(*given):
        return False
    n, k = weight.shape
    return (
        x.shape[-1] == k > 0
        and k * weight.itemsize % 16 == 0  # gemv.ALIGNED, of a module that needs Triton
        and n > 0
        and (bias is None or bias.shape == (n,))
        and (scales is None or (scales.shape == (n, 1) and scales.is_contiguous()))
        and all(t.dtype == (kind if t is weight else x.dtype) and t.is_contiguous() for t in given)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
        and not torch.is_autocast_enabled("cuda")
    )


def _for_triton(*given: Tensor) -> bool:
    return has_triton() and all(t.is_cuda and type(t) in (Tensor, nn.Parameter) for t in given)


class ServedLinear(nn.Linear):
    """``nn.Linear`` that computes :func:`served_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return served_linear(input, self.weight, self.bias)


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer of PyTorch's, or one that :func:`choose_products` or :func:`choose_served_products`
    made of it; not one of a class of a technique's."""
    return type(module) in (nn.Linear, Linear, ServedLinear)


def choose_products(model: nn.Module) -> None:
    """Have the plain linear layers of ``model``, which is on a CPU, compute :func:`linear`, where that is faster."""
    if by_onednn() or widened():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def choose_served_products(model: nn.Module) -> None:
    """Have the plain linear layers of ``model``, which is served on a GPU, compute :func:`served_linear`."""
    for module in model.modules():
        if is_linear(module):
            module.__class__ = ServedLinear


# ---- of merged projections ------------------------------------------------------------------------------------------


class Product(Protocol):
    """How merged projections multiply, in place of :data:`PLAIN` and :data:`SERVED`."""

    @property
    def wish(self) -> Wish:
        """Which peaks of its operands it would know."""
        ...

    def encodes_gated(self, both: Tensor, trained: bool) -> bool:
        """Whether :meth:`backward` takes the gradient of what SwiGLU reads, ``both``, as what that is made of;
        ``trained``: for the weight's gradient too."""
        ...

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, trained: bool, grad: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """x [..., k] Wᵀ + bias [..., n], and what :meth:`backward` needs. ``trained``: whether that is the weight's
        gradient too, ``grad``: whether there is a backward pass."""
        ...

    def backward(
        self, d: Tensor | GatedGradient, kept: Sequence[Tensor | None], weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the input's rows [m, k] and of a trained weight [n, k], of which ``weight`` is a part, from
        ``d`` [m, n]."""
        ...


class OwnProduct(nn.Linear):
    """A linear layer that a technique lets multiply in another way; layers with the same product can be merged."""

    product: Product


class Joined(nn.Module):
    """A linear layer of a served model that holds its weight in its own way, and can be one with others of its class
    that read the same input: those whose tensors lie together."""

    in_features: int
    out_features: int
    kernels: Kernels | None = None
    """Who computes what, by choice of the engine; None: ours, where we have a kernel."""

    def rows(self) -> list[Tensor]:
        """Its tensors that those of others are to follow: their rows are outputs, or counters for these."""
        raise NotImplementedError

    def joined(self, parts: Sequence[nn.Module]) -> Joined | None:
        """The layer of all outputs of ``parts``, of which it is the first; None: they do not lie together, or differ
        in what they compute."""
        raise NotImplementedError

    def gated(self, x: Tensor) -> Tensor:
        """SwiGLU of its outputs, gates before what is gated: [..., k] → [..., n / 2]."""
        raise NotImplementedError


class _Plain:
    wish: Wish = ""

    def encodes_gated(self, both: Tensor, trained: bool) -> bool:
        return False

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, trained: bool, grad: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return linear(x, weight, bias), (x if trained else None, weight)

    def backward(
        self, d: Tensor | GatedGradient, kept: Sequence[Tensor | None], weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x, whole = kept
        assert whole is not None
        assert isinstance(d, Tensor)
        dw = None if x is None else mm(d.t(), x.flatten(0, -2)).to(weight.dtype)
        return linear(d, whole.t()), dw


class _Served(_Plain):
    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, trained: bool, grad: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return super().forward(x, weight, bias, trained, grad) if grad else (served_linear(x, weight, bias), ())


PLAIN = _Plain()
"""The product in the operands' dtype."""
SERVED = _Served()
"""The same of a model that is served on a GPU."""


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a`` [m, k] times ``b`` [k, n] to ``total`` [m, n]. CUDA sums 16-bit products in fp32 where they
    are added, without a tensor between."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += mm(a, b)
