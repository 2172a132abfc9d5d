"""Autograd functions that run one kernel where the plain modules run several, on the kernels of :mod:`dispatch`.

Each computes in float32 (float64 for float64 inputs) and writes the dtype that the plain modules write. Callers ask
:func:`~ridgeline.nn.kernels.dispatch.usable` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels import peaks
from ridgeline.nn.kernels.backends import GatedKernel
from ridgeline.nn.kernels.dispatch import call, usable
from ridgeline.nn.kernels.native import TYPES
from ridgeline.nn.kernels.peaks import GatedGradient, Peaks, Wish
from ridgeline.nn.kernels.products import PLAIN, SERVED, Product, add_product, linear, served_gated
from ridgeline.nn.kernels.widened import matmul, mm
from ridgeline.nn.model.loss import IGNORE

ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1}
"""Activations with a kernel: SwiGLU's, and the tanh form of GELU behind a bias."""


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _normed(x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool,
            out_dtype: torch.dtype, columns: int,
            found: Peaks | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(sum, norm of it, 1 / standard deviation of each row, mean of each row of a LayerNorm)."""
    x = x.contiguous()
    update = None if update is None else update.contiguous()
    wide = _wide(x)
    size = x.shape[-1]
    rows = x.numel() // size
    total = x if update is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=out_dtype)
    rstd = torch.empty(rows, dtype=wide, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    call("rl_add_norm", wide == torch.float64, x, TYPES[x.dtype], update,
         TYPES[(x if update is None else update).dtype], weight, TYPES[weight.dtype], bias, total, y,
         TYPES[y.dtype], mean, rstd, rows, size, float(eps), columns=columns, peaks=found)  # fmt: skip
    return total, y, rstd, mean


class _AddNorm(torch.autograd.Function):
    """(x + update, norm(x + update)) in one pass each way; without an update, (x, norm(x)).

    RMSNorm (``centered`` False) or LayerNorm. Saves the sum and one or two numbers per row, as the plain norms do; in
    backward the gradient that reaches the sum by another way is added before it is written. ``found`` receives the
    peaks of the norm; ``wish``: of which peaks the update's gradient has.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
                centered: bool, out_dtype: torch.dtype, columns: int, found: Peaks | None,
                wish: Wish) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, y, rstd, mean = _normed(x, update, weight, bias, eps, centered, out_dtype, columns, found)
        ctx.save_for_backward(total, weight, rstd, mean)
        ctx.columns, ctx.wish = columns, wish
        ctx.update_dtype = None if update is None else update.dtype
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd, mean = ctx.saved_tensors
        low = None
        if dy is None:
            dx = d_total
            dw = db = None
        else:
            dy = dy.contiguous()
            d_total = None if d_total is None else d_total.to(total.dtype).contiguous()
            dx = torch.empty_like(total)
            dw = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
            db = torch.empty_like(weight) if ctx.has_bias and ctx.needs_input_grad[3] else None
            if ctx.update_dtype not in (None, dx.dtype) and peaks.on_gpu(dx):
                low = torch.empty_like(dx, dtype=ctx.update_dtype)
            found = None if ctx.update_dtype is None or ctx.columns else peaks.wanted(dx, ctx.wish)
            call("rl_add_norm_backward", total.dtype == torch.float64, dy, TYPES[dy.dtype], d_total, total,
                 TYPES[total.dtype], weight, TYPES[weight.dtype], mean, rstd, dx, dw, db, rstd.numel(),
                 total.shape[-1], columns=ctx.columns, low=low, peaks=found)  # fmt: skip
            peaks.note(dx if low is None else low, found)
        assert dx is not None
        if low is None and ctx.update_dtype is not None:
            low = dx.to(ctx.update_dtype)
        return dx, low, dw, db, None, None, None, None, None, None


class _Norm(torch.autograd.Function):
    """:class:`_AddNorm` without an update: [..., size] → [..., size]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool,
                out_dtype: torch.dtype, columns: int, found: Peaks | None) -> Tensor:  # fmt: skip
        _, y = _AddNorm.forward(ctx, x, None, weight, bias, eps, centered, out_dtype, columns, found, "")
        ctx.set_materialize_grads(True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, rstd, mean = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(total)
        dw = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        db = torch.empty_like(weight) if ctx.has_bias and ctx.needs_input_grad[2] else None
        call("rl_add_norm_backward", total.dtype == torch.float64, dy, TYPES[dy.dtype], None, total,
             TYPES[total.dtype], weight, TYPES[weight.dtype], mean, rstd, dx, dw, db, rstd.numel(),
             total.shape[-1], columns=ctx.columns)  # fmt: skip
        return dx, dw, db, None, None, None, None, None


def _activated(x: Tensor, bias: Tensor | None, activation: str, found: Peaks | None = None) -> Tensor:
    """The result of :class:`_BiasActivation`."""
    width = x.shape[-1] // (2 if activation == "silu" else 1)
    y = x.new_empty(*x.shape[:-1], width)
    call("rl_activation", x.dtype == torch.float64, x, TYPES[x.dtype], bias,
         TYPES[x.dtype if bias is None else bias.dtype], y, y.numel() // width, width,
         ACTIVATION_KINDS[activation], peaks=found)  # fmt: skip
    return y


class _BiasActivation(torch.autograd.Function):
    """activation(x + bias) for x [..., width] (``gelu_tanh``), or silu(gate) · up for x = [gate | up] (``silu``).

    Saves its input only. The backward pass writes into it, so that it can run once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        y = _activated(x, bias, activation)
        ctx.save_for_backward(x, bias)
        ctx.kind = ACTIVATION_KINDS[activation]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, db = torch.empty_like(x), None if bias is None else torch.empty_like(bias)
        _activation_backward(dy.contiguous(), x, bias, dx, db, ctx.kind)
        return dx, db, None


def _activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, db: Tensor | None, kind: int) -> None:
    width = dy.shape[-1]
    call("rl_activation_backward", x.dtype == torch.float64, dy, x, TYPES[x.dtype], bias,
         TYPES[x.dtype if bias is None else bias.dtype], dx, db, dy.numel() // width, width, kind)  # fmt: skip


def _trained(parts: Sequence[Tensor | None]) -> bool:
    """Whether the weights of a merged product train: all of them do, or none."""
    return parts[0] is not None and parts[0].requires_grad


def _product_gradients(
    product: Product, d: Tensor | GatedGradient, kept: Sequence[Tensor | None], weights: list[Tensor],
    biases: list[Tensor | None],
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """dx [rows, k], and the gradients of the parts of a merged product, from ``d`` [rows, Σ n_i]."""
    sizes = [p.shape[0] for p in weights]
    db: list[Tensor | None] = [None] * len(sizes)
    dx, whole = product.backward(d, kept, weights[0])
    dw: list[Tensor | None] = [None] * len(sizes) if whole is None else list(whole.split(sizes))
    if biases[0] is not None and biases[0].requires_grad:
        assert isinstance(d, Tensor)
        db = list(d.sum(0, dtype=_wide(d)).to(biases[0].dtype).split(sizes))
    return dx, dw, db


class _GatedLinear(torch.autograd.Function):
    """silu(x Wgᵀ + bg) · (x Wuᵀ + bu) from one product: x [rows, k] → [rows, f]. ``merged`` is the combined [Wg; Wu];
    ``kernel`` computes the activation, None: ours. ``grad``: whether gradients are recorded, which only the caller
    knows. ``found`` receives the result's peaks.

    Saves x and the product. Its backward pass overwrites the product with its gradient, unless the graph is retained:
    a pipeline that delays weights' gradients runs it twice. Products that encode the gradient make its codes instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, merged: Tensor, bias: Tensor | None, kernel: GatedKernel | None, product: Product,
                grad: bool, found: Peaks | None, *parts: Tensor | None) -> Tensor:  # fmt: skip
        both, kept = product.forward(x, merged, bias, grad and _trained(parts), grad and any(ctx.needs_input_grad))
        y = _activated(both, None, "silu", found) if kernel is None else kernel.forward(both)
        ctx.save_for_backward(both, *parts, *kept)
        ctx.kernel, ctx.product = kernel, product
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        both, *parts = ctx.saved_tensors
        rest = parts[4:], parts[:2], parts[2:4]
        biased = parts[2] is not None and parts[2].requires_grad
        if ctx.kernel is None and not biased and ctx.product.encodes_gated(both, _trained(parts)):
            dx, dw, db = _product_gradients(ctx.product, GatedGradient(dy.contiguous(), both), *rest)
            return dx, None, None, None, None, None, None, *dw, *db
        if _get_current_graph_task_keep_graph():
            both = both.clone()
        if ctx.kernel is not None:
            ctx.kernel.backward(both, dy.contiguous())
        else:
            _activation_backward(dy.contiguous(), both, None, both, None, 0)
        both[:0].zero_()  # tells autograd that it was written to, so that a second backward is refused
        dx, dw, db = _product_gradients(ctx.product, both, *rest)
        return dx, None, None, None, None, None, None, *dw, *db


class _QKV(torch.autograd.Function):
    """Queries, keys and values of x [B, S, k] by one product, with rotary embedding applied in place.

    Returns three views [B, S, heads, D] of one tensor. ``rope``: (cos, signed sin), each [S, 1, D] or [B, S, 1, D].
    ``grad`` as of :class:`_GatedLinear`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, merged: Tensor, bias: Tensor | None, head_dim: int, rope: Any, product: Product,
                grad: bool, *parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        out, kept = product.forward(x, merged, bias, grad and _trained(parts), grad and any(ctx.needs_input_grad))
        sizes = [p.shape[0] for p in parts[:3] if p is not None]
        turned = (sizes[0] + sizes[1]) // head_dim
        if rope is not None:
            _rotate(out, rope[0], rope[1], turned, head_dim, 1)
        ctx.x_shape, ctx.product = x.shape, product
        ctx.save_for_backward(*(rope or (None, None)), *parts, *kept)
        ctx.sizes, ctx.turned, ctx.head_dim = sizes, turned, head_dim
        ctx.set_materialize_grads(True)
        q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in out.split(sizes, -1))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *parts = ctx.saved_tensors
        d = grads[0].new_empty(*grads[0].shape[:2], sum(ctx.sizes))
        if peaks.on_gpu(d) and d.numel() and ctx.head_dim % 2 == 0 and len({g.dtype for g in grads}) == 1:
            found = peaks.wanted(d, ctx.product.wish)
            rope = None if cos is None else (cos, sin)
            call("rl_gather_heads", d, list(grads), rope, ctx.turned, peaks=found)
            peaks.note(d, found)
        else:
            for part, g in zip(d.split(ctx.sizes, -1), grads, strict=True):
                part.unflatten(-1, (-1, ctx.head_dim)).copy_(g)
            if cos is not None:
                _rotate(d, cos, sin, ctx.turned, ctx.head_dim, -1)
        rows = peaks.shared(d, d.flatten(0, 1))
        dx, dw, db = _product_gradients(ctx.product, rows, parts[6:], parts[:3], parts[3:6])
        return dx.view(ctx.x_shape), None, None, None, None, None, None, *dw, *db


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int, sign: int) -> None:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    period = cos.numel() // head_dim
    call("rl_rotate", x.dtype == torch.float64, x, TYPES[x.dtype], cos.contiguous(), sin.contiguous(),
         TYPES[cos.dtype], rows, width, heads, head_dim, period, float(sign))  # fmt: skip


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> Tensor:
    """Rotate the first ``heads`` heads of ``x`` [..., width], contiguous, in place: rotary embedding by tables of
    [rows or a divisor of them, 1, head_dim]."""
    _rotate(x, cos, sin, heads, head_dim, 1)
    return x


class _Probabilities(torch.autograd.Function):
    """softmax(scale · q kᵀ + bias) of q [n, m, D], k [n, T, D], the scores overwritten: [n, m, T].

    ``bias`` [S, T] repeats over the rows (m is a multiple of S), or is [n, m, T] whole.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, scale: float, columns: int) -> Tensor:
        p = matmul(q, k.transpose(1, 2))
        rows, size = p.shape[0] * p.shape[1], p.shape[2]
        bias = None if bias is None else bias.contiguous()
        call("rl_softmax", p.dtype == torch.float64, p, TYPES[p.dtype], bias,
             TYPES[p.dtype if bias is None else bias.dtype], 1 if bias is None else bias.numel() // size, rows, size,
             scale, columns=columns)  # fmt: skip
        ctx.save_for_backward(q, k, p)
        ctx.scale, ctx.columns = scale, columns
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        q, k, p = ctx.saved_tensors
        dp = dp.contiguous()  # made by the product with the values for this function alone, so it may be overwritten
        call("rl_softmax_backward", p.dtype == torch.float64, dp, p, TYPES[p.dtype], p.shape[0] * p.shape[1],
             p.shape[2], ctx.scale, columns=ctx.columns)  # fmt: skip
        return matmul(dp, k), matmul(dp.transpose(1, 2), q), None, None, None


def loss_and_gradient(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    """Sum of token losses (fp32 scalar, or wider) of logits [N, V], which become softmax - onehot with ``gradient``.

    Rows whose label is ignored become zero. On the kernel where it works, else on plain operators.
    """
    if usable(logits) and logits.is_contiguous():
        value = call("rl_cross_entropy", logits.dtype == torch.float64, logits, TYPES[logits.dtype],
                     labels.contiguous(), *logits.shape, gradient)  # fmt: skip
        return value if isinstance(value, Tensor) else logits.new_tensor(value, dtype=_wide(logits))
    valid = (labels != IGNORE).unsqueeze(1)
    target = labels.clamp_min(0).unsqueeze(1)
    x = logits.to(_wide(logits))
    picked = x.gather(1, target)
    peak = x.amax(1, keepdim=True)
    x = x.sub_(peak).exp_()
    total = x.sum(1, keepdim=True)
    loss = (total.log() + peak - picked).mul_(valid).sum()
    if gradient:
        logits.copy_(x.mul_(valid / total).scatter_add_(1, target, -valid.to(x.dtype)))
    return loss


def _scaled_once(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
    """The saved gradients, scaled in place: there is no room for copies. A backward pass that is divided into one for
    inputs and one for weights (zero-bubble pipelines) comes twice, with the same scale."""
    saved: tuple[Tensor | None, ...] = ctx.saved_tensors
    before = getattr(ctx, "scale", None)
    if before is None:
        ctx.scale = scale
        for t in saved:
            if t is not None:
                t.data.mul_(scale)  # .data: autograd would refuse to give out what was written to
    elif not torch.equal(before, scale):
        raise RuntimeError("a fused loss was differentiated twice with different gradients")
    return saved


class _LogitsLoss(torch.autograd.Function):
    """Sum of token losses of logits [N, V], which are overwritten by their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        need = bool(ctx.needs_input_grad[0])
        total = loss_and_gradient(logits, labels, need)
        if need:
            ctx.save_for_backward(logits)
            logits[:0].zero_()  # tells autograd that they were written to, so that no one reads them as logits
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = _scaled_once(ctx, scale)
        return gradient, None


class _LinearLoss(torch.autograd.Function):
    """Sum of token losses of hidden [N, H] under a head [V, H], by chunks of rows, so that no [N, V] tensor exists.

    A chunk's logits become their own gradient at once, from which its part of the hidden states' gradient and of the
    head's is computed in the forward pass; backward only scales them.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int,
                dtype: torch.dtype) -> Tensor:  # fmt: skip
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        x, w = hidden.to(dtype), weight.to(dtype)
        dx = torch.empty_like(hidden, dtype=dtype) if need_x else None
        dw = torch.zeros_like(weight, dtype=_wide(weight)) if need_w else None
        db = torch.zeros_like(bias, dtype=_wide(bias)) if need_b and bias is not None else None
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        for start in range(0, x.shape[0], rows):
            part, target = x[start : start + rows], labels[start : start + rows]
            logits = linear(part, w, None if bias is None else bias.to(dtype))
            total += loss_and_gradient(logits, target, need_x or need_w)
            if dx is not None:
                mm(logits, w, out=dx[start : start + rows])
            if dw is not None:
                add_product(dw, logits.t(), part)
            if db is not None:
                db += logits.sum(0, dtype=db.dtype)
            del logits  # before the next chunk's are made
        ctx.save_for_backward(dx, dw, db)
        ctx.dtypes = hidden.dtype, (getattr(weight, "grad_dtype", None) if weight.is_leaf else None) or weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = _scaled_once(ctx, scale)
        x_dtype, w_dtype = ctx.dtypes
        return (None if dx is None else dx.to(x_dtype), None if dw is None else dw.to(w_dtype),
                None if db is None else db.to(w_dtype), None, None, None)  # fmt: skip


def adamw_(low: Tensor | None, master: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float,
           beta2: float, eps: float, decay: float, step: int) -> None:  # fmt: skip
    """One AdamW step (arXiv:1711.05101) of flat float32 vectors in one pass; ``low`` receives the weights rounded."""
    call("rl_adamw", low, 0 if low is None else TYPES[low.dtype], master, grad, m, v, master.numel(), 1 - lr * decay,
         1 - beta1, beta2, 1 - beta2, eps, -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5)  # fmt: skip


# What the classes above offer, with types. ``columns``: see :func:`~ridgeline.nn.kernels.dispatch.call`.


def add_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool,
             dtype: torch.dtype, columns: int = 0, wish: Wish = "",
             update_wish: Wish = "") -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + update, norm of that in ``dtype``), both [..., size]. Of which peaks the norm has, if gradients are recorded
    (``wish``), and the update's gradient."""
    if not torch.is_grad_enabled():  # without autograd's bookkeeping, which takes the host longer than the rest
        return _normed(x, update, weight, bias, eps, centered, dtype, columns)[:2]
    found = _found(x, wish, columns)
    total, y = _AddNorm.apply(x, update, weight, bias, eps, centered, dtype, columns, found, update_wish)  # type: ignore[no-untyped-call]
    return total, peaks.note(y, found)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, dtype: torch.dtype,
         columns: int = 0, wish: Wish = "") -> Tensor:  # fmt: skip
    """LayerNorm (``centered``) or RMSNorm of x [..., size] in ``dtype``, with peaks as :func:`add_norm`."""
    if not torch.is_grad_enabled():
        return _normed(x, None, weight, bias, eps, centered, dtype, columns)[1]
    found = _found(x, wish, columns)
    y: Tensor = _Norm.apply(x, weight, bias, eps, centered, dtype, columns, found)  # type: ignore[no-untyped-call]
    return peaks.note(y, found)


def _found(x: Tensor, wish: Wish, columns: int) -> Peaks | None:
    return peaks.wanted(x, wish) if wish and not columns else None


def bias_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x + bias), x [..., width]; or silu(gate) · up [..., width] of x = [gate | up]."""
    if not torch.is_grad_enabled():
        return _activated(x, bias, activation)
    y: Tensor = _BiasActivation.apply(x, bias, activation)  # type: ignore[no-untyped-call]
    return y


def gated_linear(x: Tensor, merged: Tensor, bias: Tensor | None, parts: list[Tensor | None],
                 kernel: GatedKernel | None = None, product: Product = PLAIN, wish: Wish = "") -> Tensor:  # fmt: skip
    """SwiGLU of x [rows, k] → [rows, f]. ``parts``: gate and up weights (of which ``merged`` is made), then biases.
    ``wish``: of which peaks the result has, if gradients are recorded and ours computes it."""
    grad = torch.is_grad_enabled()
    if not grad:
        if product is SERVED and kernel is None and (at_once := served_gated(x, merged, bias)) is not None:
            return at_once
        both, _ = product.forward(x, merged, bias, False, False)
        return _activated(both, None, "silu") if kernel is None else kernel.forward(both)
    found = None
    if wish and kernel is None and x.numel() and peaks.on_gpu(x):
        found = peaks.room(x.shape[0], merged.shape[0] // 2, wish, x.device)
    y: Tensor = _GatedLinear.apply(x, merged, bias, kernel, product, grad, found, *parts)  # type: ignore[no-untyped-call]
    return peaks.note(y, found)


def qkv(x: Tensor, merged: Tensor, bias: Tensor | None, head_dim: int, rope: tuple[Tensor, Tensor] | None,
        parts: list[Tensor | None], product: Product = PLAIN) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated queries and keys, and values, of x [B, S, k]: [B, S, heads, D]. ``parts``: three weights, three
    biases."""
    grad = torch.is_grad_enabled()
    if not grad:
        out, _ = product.forward(x, merged, bias, False, False)
        sizes = [p.shape[0] for p in parts[:3] if p is not None]
        if rope is not None:
            _rotate(out, rope[0], rope[1], (sizes[0] + sizes[1]) // head_dim, head_dim, 1)
        heads = out.unflatten(-1, (-1, head_dim))
        q, k, v = heads.split([n // head_dim for n in sizes], -2)
        return q, k, v
    q, k, v = _QKV.apply(x, merged, bias, head_dim, rope, product, grad, *parts)  # type: ignore[no-untyped-call]
    return q, k, v


def probabilities(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, columns: int = 0) -> Tensor:
    """softmax(scale · q kᵀ + bias) of q [n, m, D] and k [n, T, D]: [n, m, T]."""
    p: Tensor = _Probabilities.apply(q, k, bias, scale, columns)  # type: ignore[no-untyped-call]
    return p


def logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses of logits [N, V], which are overwritten."""
    total: Tensor = _LogitsLoss.apply(logits, labels)  # type: ignore[no-untyped-call]
    return total


def linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int,
                dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Sum of token losses of hidden [N, H] under a head [V, H] in ``dtype``, ``rows`` at a time."""
    total: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, rows, dtype)  # type: ignore[no-untyped-call]
    return total
