"""Linear layers whose products run in float8 (arXiv:2209.05433): e4m3 throughout, as in DeepSeek-V3 (arXiv:2412.19437,
section 3.3.2). With e5m2 gradients, as in the former, training on an H100 diverged, though their codes and products by
themselves are right there.

Each tensor has one scale, from its current largest magnitude; or each row of an operand has one, which is a power of
two (as torchao's recipe ``rowwise``). Where the device multiplies float8 (Ada, Hopper and later) the product is
``torch._scaled_mm``, which rounds results to bf16 where rows have scales; elsewhere it is emulated: the operands are
dequantized and multiplied in fp32, which gives the same products of the same rounded numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels import peaks
from ridgeline.nn.kernels.adjacency import adjacent
from ridgeline.nn.kernels.backends import FLOAT8
from ridgeline.nn.kernels.dispatch import has_float8, note_library
from ridgeline.nn.kernels.functions import bias_activation
from ridgeline.nn.kernels.peaks import GatedGradient, Wish
from ridgeline.nn.kernels.products import Joined, OwnProduct, is_linear, product_of_both_codes, product_of_codes
from ridgeline.nn.model.moe import Experts
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.nn.quant.codec import E4M3, Layouts, encodes_gated, layouts, quantize
from ridgeline.nn.quant.codes import bare, counters
from ridgeline.nn.quant.packed_model import BIASES, PackedExperts
from ridgeline.spec.lowbit import FLOAT8_ROWS, MANY_ROWS

_latest: tuple[weakref.ref[Tensor], int, bool, Layouts] | None = None
"""The last quantized input, its version, whether its rows have scales, and its codes: layers that read the same tensor
share them."""


def _wish(rowwise: bool) -> Wish:
    return "lines" if rowwise else "whole"


def _coded(x: Tensor, rowwise: bool = False, transpose: bool = False) -> Layouts:
    """Codes of the rows of ``x`` [..., k], with ``transpose`` also transposed."""
    global _latest
    rows = x.detach().flatten(0, -2)
    if x.is_inference():  # without a version counter a change cannot be detected
        return layouts(rows, E4M3, rowwise, transpose)
    known = None if _latest is None or _latest[0]() is not x else _latest
    if known is not None and known[1:3] == (x._version, rowwise) and (known[3].transposed is not None or not transpose):
        return known[3]

    def forget(ref: Any) -> None:
        global _latest
        if _latest is not None and _latest[0] is ref:
            _latest = None

    codes = layouts(rows, E4M3, rowwise, transpose, peaks.known(x, _wish(rowwise)))
    _latest = weakref.ref(x, forget), x._version, rowwise, codes
    return codes


def product(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a [m, k] · bᵀ of b [n, k], both float8 codes with the inverses of their scales, → [m, n] in ``dtype``. ``fast``:
    sums may be kept in fewer bits than fp32 (Hopper's tensor cores otherwise move them to registers)."""
    if a.numel() and has_float8(a.device) and a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0:
        rowwise = a_inverse.dim() > 0
        out: Tensor = torch._scaled_mm(
            a.contiguous(), b.contiguous().t(), scale_a=a_inverse, scale_b=b_inverse.t() if rowwise else b_inverse,
            out_dtype=torch.bfloat16 if rowwise else dtype,  # the only one that PyTorch has with scales for rows
            use_fast_accum=fast,
        )  # fmt: skip
        return out.to(dtype)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a.float().mul_(a_inverse), b.float().mul_(b_inverse).t()).to(dtype)


@dataclass(frozen=True)
class Float8Product:
    """How linear layers multiply (:class:`ridgeline.nn.kernels.products.Product`)."""

    rowwise: bool = False
    keep: bool = True
    """Whether codes of weights, a byte each, are kept from forward to backward, so that weights are quantized once;
    else they are quantized again: codes would outlive what is freed in between, or be moved with activations."""

    @property
    def wish(self) -> Wish:
        """The peaks that its scales follow from."""
        return _wish(self.rowwise)

    def encodes_gated(self, both: Tensor, trained: bool) -> bool:
        """Where one kernel writes codes both as they are and transposed."""
        return trained and encodes_gated(both)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, trained: bool, grad: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
        """x [..., k], weight [n, k] → [..., n] in ``dtype`` (x's own if None), and what :meth:`backward` needs.
        ``trained``: whether the weight's gradient is needed, ``grad``: whether any is."""
        a = _coded(x, self.rowwise, trained)
        w = layouts(weight.detach(), E4M3, self.rowwise, self.keep and grad)
        y = product(a.rows, a.inverse_scale, w.rows, w.inverse_scale, dtype or x.dtype, fast=True)
        y = y.view(*x.shape[:-1], weight.shape[0])
        mine = (w.transposed, w.transposed_inverse_scale) if self.keep else (weight, None)
        read = (a.transposed, a.transposed_inverse_scale) if trained else (None, None)
        return y if bias is None else y + bias.to(y.dtype), (*mine, *read)

    def backward(
        self, d: Tensor | GatedGradient, kept: Sequence[Tensor | None], weight: Tensor,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Gradients of the input's rows [m, k], in ``dtype`` (d's own if None), and of a trained ``weight``, from ``d``
        [m, n]."""
        w, w_inverse, x, x_inverse = kept
        known = peaks.known(d, self.wish) if isinstance(d, Tensor) else None
        g = layouts(d, E4M3, self.rowwise, x is not None, known)
        dtype = dtype or (d.dtype if isinstance(d, Tensor) else d.both.dtype)
        if w_inverse is None:
            assert w is not None
            _, _, w, w_inverse = layouts(w.detach(), E4M3, self.rowwise)
        assert w is not None
        assert w_inverse is not None
        dx = product(g.rows, g.inverse_scale, w, w_inverse, dtype)
        if x is None:
            return dx, None
        assert x_inverse is not None
        assert g.transposed is not None
        assert g.transposed_inverse_scale is not None
        wide = (getattr(weight, "grad_dtype", None) if weight.is_leaf else None) or weight.dtype
        return dx, product(g.transposed, g.transposed_inverse_scale, x, x_inverse, wide)


class _Fp8Linear(torch.autograd.Function):
    """y = x Wᵀ. ``grad``: whether gradients are recorded, which only the caller knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8Product, dtype: torch.dtype, grad: bool) -> Tensor:
        need_x, need_w, *_ = (grad and needed for needed in ctx.needs_input_grad)
        y, kept = how.forward(x, weight, None, need_w, need_x or need_w, dtype)
        ctx.save_for_backward(weight, *kept)
        ctx.how, ctx.x_dtype = how, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dx, dw = ctx.how.backward(peaks.shared(dy, dy.flatten(0, -2)), kept, weight, ctx.x_dtype)
        return dx.view(*dy.shape[:-1], weight.shape[1]), dw, None, None, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, how: Float8Product = Float8Product()) -> Tensor:
    """``F.linear`` with its three products in float8: x [..., k], weight [n, k] → [..., n] in the compute dtype."""
    dtype = compute_dtype(x)
    y: Tensor = _Fp8Linear.apply(x, weight, how, dtype, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(dtype)


class Fp8Linear(OwnProduct):
    """A linear layer that multiplies in float8; its parameters are those of ``nn.Linear``."""

    product: Float8Product = Float8Product()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return fp8_linear(x, self.weight, self.bias, self.product)


def use_fp8(model: nn.Module, how: Float8Product = Float8Product()) -> list[str]:
    """Make the linear layers of the blocks (``*_proj``, the base of an adapted one, experts) multiply in float8.

    Returns their names.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if is_linear(module) and name.removesuffix(".base").endswith("_proj"):
            module.__class__ = Fp8Linear
            cast(Fp8Linear, module).product = how
            names.append(name)
        elif isinstance(module, Experts):
            module.linear = partial(fp8_linear, how=how)
            names.append(name)
    return names


class StoredFp8Linear(Joined):
    """A frozen linear layer stored as e4m3 codes (a byte per weight) with one scale, for inference.

    Few rows on a GPU (``FLOAT8_ROWS``) are multiplied as they are, in 16 bits, by weights that are widened in
    registers. Of more rows, where the device multiplies float8, inputs are rounded to e4m3 with a power of two for each
    row, found and written by one kernel, so that no row's result depends on what others hold; the codes are multiplied
    by a kernel of ours on Hopper, up to ``MANY_ROWS`` rows, else by ``torch._scaled_mm``, which has scales for rows
    and rounds results to bf16. Elsewhere weights are widened and inputs not rounded: on a GPU
    that does not multiply float8 in registers, up to ``MANY_ROWS`` rows.
    """

    inverse: Tensor
    """What codes are multiplied by, fp32 [out, 1]: of each row, so that layers can be joined."""
    arrived: Tensor
    """As of :class:`~ridgeline.nn.quant.codes.Stripes`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = quantize(linear.weight.detach(), E4M3)
        self.codes = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.register_buffer("inverse", scale.reciprocal().repeat(self.out_features, 1))
        self.register_buffer("arrived", counters(self.out_features, codes.device), persistent=False)
        self.bias = linear.bias

    def rows(self) -> list[Tensor]:
        """Codes, what they are multiplied by, and counters."""
        return [self.codes, self.inverse, self.arrived]

    def joined(self, parts: Sequence[nn.Module]) -> StoredFp8Linear | None:
        """Weights keep the scales of their parts."""
        alike = cast(Sequence[StoredFp8Linear], parts)
        found = [adjacent(list(held)) for held in zip(*(p.rows() for p in alike), strict=True)]
        codes, inverse, arrived = found
        biases: list[Tensor] = [p.bias for p in alike if p.bias is not None]
        if codes is None or inverse is None or arrived is None or len(biases) not in (0, len(alike)):
            return None
        whole = bare(self)
        whole._buffers = {}
        bias = torch.cat(biases) if biases else None
        vars(whole).update(codes=codes, inverse=inverse, arrived=arrived, out_features=len(codes), bias=bias)
        return whole

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if (y := self._by_codes(x)) is not None:
            return y
        dtype, codes = compute_dtype(x), self.codes.view(E4M3)
        if has_float8(x.device):
            read = _coded(x, rowwise=True)
            few = None
            if self.kernels is None or self.kernels.ours(FLOAT8):
                few = product_of_both_codes(read.rows, read.inverse_scale, codes, self.inverse, self.arrived,
                                            self.bias, dtype)  # fmt: skip
            if few is not None:
                return few.view(*x.shape[:-1], self.out_features)
            note_library()
            y = product(read.rows, read.inverse_scale, codes, self.inverse, dtype, fast=True)
            y = y.view(*x.shape[:-1], self.out_features)
        else:
            y = nn.functional.linear(x.to(dtype), codes.float().mul_(self.inverse).to(dtype))
        return y if self.bias is None else y + self.bias.to(dtype)

    def gated(self, x: Tensor) -> Tensor:
        """SwiGLU of gates, the first half of the outputs, and the others: [..., in] → [..., out / 2]."""
        y = self._by_codes(x, gated=True)
        return bias_activation(self(x), None, "silu") if y is None else y

    def most_rows(self, device: torch.device) -> int:
        """Rows of an expert up to which :meth:`grouped` is faster than casts and a product for each; 0: never."""
        return 0 if self.in_features % 16 else FLOAT8_ROWS if has_float8(device) else MANY_ROWS

    def grouped(self, x: Tensor, starts: Tensor, experts: int, bias: Tensor | None) -> Tensor:
        """The product of all experts, whose weights these are, on a GPU, with inputs in 16 bits: see
        :func:`~ridgeline.nn.kernels.grouped_codes.grouped_product`."""
        from ridgeline.nn.kernels.grouped_codes import grouped_float8_product

        return grouped_float8_product(x, starts, experts, self.codes, self.inverse, self.arrived, bias)

    def _by_codes(self, x: Tensor, gated: bool = False) -> Tensor | None:
        return product_of_codes(x, self.codes.view(E4M3), self.inverse, self.arrived, self.bias, gated)


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
