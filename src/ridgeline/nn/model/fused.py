"""Replaces functions of the plain model by fused ones: merged projections, norms with residuals, softmax.

The loss: :mod:`~ridgeline.nn.model.fused_loss`.

Each replacement checks its tensors when it is called and falls back to the plain module's computation where the kernels
do not apply: without a compiler or Triton, on parameters that a technique divides, on layers that are wrapped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ridgeline.nn.kernels import functions, products
from ridgeline.nn.kernels.backends import GatedKernel, NormKernel
from ridgeline.nn.kernels.dispatch import usable
from ridgeline.nn.kernels.peaks import Wish, shared
from ridgeline.nn.kernels.products import ServedLinear, is_linear, linear, served_linear
from ridgeline.nn.kernels.widened import matmul
from ridgeline.nn.model.attention import Attention, by_heads, naive_attention, project
from ridgeline.nn.model.joined_weights import (
    Known,
    joined_codes_product,
    joined_layer,
    lay_together,
    merged_weights,
)
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.mlp import MLP, expand, gated
from ridgeline.nn.model.norm import RMSNorm, compute_dtype
from ridgeline.nn.model.rotary import Rope, rotate
from ridgeline.nn.model.transformer import Transformer, TransformerBlock, add_then_norm

# ---- residual additions and norms -----------------------------------------------------------------------------------


def fuse_elementwise(model: Transformer, kernel: NormKernel | None = None) -> None:
    """Fuse residual additions into the following norms, biases into activations, scale and mask into softmax; what is
    fused already stays. ``kernel``: computes RMS norms; None: ours."""
    both = (norm, add_norm) if kernel is None else (partial(norm, kernel=kernel), partial(add_norm, kernel=kernel))
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.add_norm = both[1] if module.add_norm is add_then_norm else module.add_norm
        elif isinstance(module, (RMSNorm, nn.LayerNorm)) and "forward" not in vars(module):
            module.forward = _Bound(both[0], module)  # type: ignore[method-assign]
        elif isinstance(module, MLP) and module.expand is expand:
            module.expand = expand_biased


def share_peaks(model: Transformer) -> None:
    """Have fused RMS norms find the peaks of what they write, and of the gradients that they send back, which the
    products on either side would know (:mod:`~ridgeline.nn.kernels.peaks`)."""
    for block in model.modules():
        if not isinstance(block, TransformerBlock) or not isinstance(block.attention, Attention):
            continue
        if isinstance(block.attention_norm, RMSNorm):
            block.attention_norm.wish = _wish(block.attention.q_proj)
        if isinstance(block.mlp_norm, RMSNorm) and not block.parallel and block.cross_norm is None:
            block.mlp_norm.update_wish = _wish(block.attention.o_proj)
            block.mlp_norm.wish = _wish(block.mlp.up_proj) if isinstance(block.mlp, MLP) else ""


def _wish(reader: nn.Module) -> Wish:
    inner = getattr(reader, "base", reader)  # of a layer with an adapter
    return inner.product.wish if isinstance(inner, products.OwnProduct) else ""


def fold(model: Transformer, columns: int) -> None:
    """Make fused norms and softmax hold ``columns`` of a row at a time, so that rows of any width fit a thread
    block."""
    for module in model.modules():
        if isinstance(module, TransformerBlock) and module.add_norm is add_norm:
            module.add_norm = partial(add_norm, columns=columns)
        elif isinstance(module.forward, _Bound) and module.forward.function is norm:
            module.forward = _Bound(partial(norm, columns=columns), module)
    if model.backend.function is fused_naive_attention:
        model.set_attention(replace(model.backend, function=partial(fused_naive_attention, columns=columns)))


class _Bound:
    """A function of a module and its input that replaces the module's ``forward``; can be copied and pickled."""

    def __init__(self, function, module: nn.Module) -> None:  # type: ignore[no-untyped-def]
        self.function, self.module = function, module

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x, self.module)
        return out


def _fits(x: Tensor, module: nn.Module) -> bool:
    weight, bias = module.weight, getattr(module, "bias", None)
    return (
        not getattr(module, "offset", 0)
        and usable(x, weight, bias)  # type: ignore[arg-type]
        and x.shape[-1] == weight.shape[0]  # type: ignore[index]
        and (bias is None or bias.dtype == weight.dtype)
    )


def _norm_of(module: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    """Weight, bias, epsilon, and whether it is a LayerNorm."""
    return module.weight, getattr(module, "bias", None), module.eps, isinstance(module, nn.LayerNorm)  # type: ignore[return-value]


def norm(x: Tensor, module: nn.Module, columns: int = 0, kernel: NormKernel | None = None) -> Tensor:
    """RMSNorm or LayerNorm of ``x`` in one kernel each way. ``columns``: see :func:`fold`; ``kernel``: see
    :func:`fuse_elementwise`."""
    if not _fits(x, module):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if kernel is not None and isinstance(module, RMSNorm) and x.dtype == compute_dtype(x):
        return kernel.norm(x, module.weight, module.eps)
    return functions.norm(x, *_norm_of(module), compute_dtype(x), columns, getattr(module, "wish", ""))


def add_norm(
    x: Tensor, update: Tensor, module: nn.Module, columns: int = 0, kernel: NormKernel | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`~ridgeline.nn.model.transformer.add_then_norm` in one kernel each way."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    plain = isinstance(module, (RMSNorm, nn.LayerNorm))
    if hooked or not plain or x.shape != update.shape or not usable(update) or not _fits(x, module):
        return add_then_norm(x, update, module)
    if kernel is not None and isinstance(module, RMSNorm) and x.dtype == update.dtype == compute_dtype(x):
        return kernel.add_norm(x, update, module.weight, module.eps)
    wishes = (module.wish, module.update_wish) if isinstance(module, RMSNorm) else ()
    return functions.add_norm(x, update, *_norm_of(module), compute_dtype(x), columns, *wishes)


def expand_biased(mlp: MLP, x: Tensor) -> Tensor:
    """The plain expansion with the bias added inside the activation, where that has a kernel."""
    up = mlp.up_proj
    biased = is_linear(up) and up.bias is not None and not up._forward_hooks
    if mlp.gate_proj is not None or mlp.activation != "gelu_tanh" or not biased or not usable(x, up.weight, up.bias):
        return expand(mlp, x)
    product = (served_linear if type(up) is ServedLinear else linear)(x, up.weight)
    return functions.bias_activation(product, up.bias, mlp.activation)


def fused_naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, columns: int = 0) -> Tensor:
    """:func:`~ridgeline.nn.model.attention.naive_attention` with an in-place softmax kernel."""
    batch, heads, length, width = q.shape
    groups, total, wide = v.shape[1:]
    bias = mask.bias
    if mask.changes is not None or not usable(q, k, v, bias) or (bias is not None and bias.dim() != 2):
        return naive_attention(q, k, v, mask)
    rows = q.reshape(batch * groups, -1, width)
    keys, values = k.reshape(-1, total, width), v.reshape(-1, total, wide)
    p = functions.probabilities(rows, keys, bias, 1 / math.sqrt(width), columns)
    return matmul(p, values).view(batch, heads, length, wide)


# ---- projections ----------------------------------------------------------------------------------------------------


def merge_projections(model: Transformer, kernel: GatedKernel | None = None) -> list[str]:
    """Store the weights of projections that read one input consecutively; returns the names of the merged groups.
    ``kernel``: computes SwiGLU; None: ours.

    Parameters keep their names and shapes: they become views of one storage. If they later get separate storages (e.g.
    shards that are gathered separately), the layer runs them one by one again.
    """
    merged = []
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.q_norm is None:
            parts: list[nn.Module] = [module.q_proj, module.k_proj, module.v_proj]
            if lay_together(parts):
                module.project = project_merged
                merged.append(f"{name}.qkv")
        elif isinstance(module, MLP) and module.gate_proj is not None and module.activation == "silu":
            pair: list[nn.Module] = [module.gate_proj, module.up_proj]
            if lay_together(pair):
                module.expand = expand_merged if kernel is None else partial(expand_merged, kernel=kernel)
                merged.append(f"{name}.gate_up")
    return merged


def project_merged(
    attention: Attention, x: Tensor, rope: Rope | None, known: Known | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~ridgeline.nn.model.attention.project` by one product, whose result is rotated in place. ``known``: of
    this layer, of a served model."""
    parts: list[nn.Module] = [attention.q_proj, attention.k_proj, attention.v_proj]
    if (product := None if known is None else known.product(x)) is None:
        joined = joined_layer(parts, known)
        product = joined_codes_product(x, parts, known) if joined is None else joined(x)
    if product is not None:
        sizes: list[int] = [p.out_features for p in parts]  # type: ignore[misc]
        q, k, v = product.split(sizes, -1)
        return by_heads(attention, q, k, v, rope)
    found = merged_weights(x, parts, known)
    if found is None or (rope is not None and rope[0].shape[-1] < attention.head_dim):
        return project(attention, x, rope)
    merged, bias, how = found
    tensors: list[Tensor | None] = [*(p.weight for p in parts), *(p.bias for p in parts)]  # type: ignore[list-item]
    turned = None if attention.interleaved else rope
    q, k, v = functions.qkv(x.to(compute_dtype(x)), merged, bias, attention.head_dim, turned, tensors, how)
    if rope is not None and attention.interleaved:
        q, k = rotate(q, rope, True), rotate(k, rope, True)
    return (q if attention.query_scale == 1 else q * attention.query_scale), k, v


def expand_merged(mlp: MLP, x: Tensor, kernel: GatedKernel | None = None, known: Known | None = None) -> Tensor:
    """:func:`~ridgeline.nn.model.mlp.expand` of a SwiGLU layer by one product. ``known`` as of
    :func:`project_merged`."""
    assert mlp.gate_proj is not None
    parts: list[nn.Module] = [mlp.gate_proj, mlp.up_proj]
    if known is not None and (both := known.product(x)) is not None:
        gate, up = both.chunk(2, -1)
        return functions.bias_activation(both, None, "silu") if usable(both) else gated(mlp.activation, gate, up)
    if (y := gated_of_codes(x, parts, known)) is not None:
        return y
    found = merged_weights(x, parts, known)
    if found is None:
        return expand(mlp, x)
    merged, bias, product = found
    tensors: list[Tensor | None] = [*(p.weight for p in parts), *(p.bias for p in parts)]  # type: ignore[list-item]
    rows = x.to(compute_dtype(x)).flatten(0, -2)
    y = functions.gated_linear(shared(x, rows), merged, bias, tensors, kernel, product, _wish(mlp.down_proj))
    return shared(y, y.view(*x.shape[:-1], -1))


def gated_of_codes(x: Tensor, parts: list[nn.Module], known: Known | None) -> Tensor | None:
    """SwiGLU of a product with codes that lie together; None if they do not."""
    if (joined := joined_layer(parts, known)) is not None:
        return joined.gated(x)
    both = joined_codes_product(x, parts, known)
    return None if both is None else functions.bias_activation(both, None, "silu")
