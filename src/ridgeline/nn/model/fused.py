"""Replaces functions of the plain model by fused ones: merged projections, norms with residuals, softmax.

The loss: :mod:`~ridgeline.nn.model.fused_loss`.

Each replacement checks its tensors when it is called and falls back to the plain module's computation where the kernels
do not apply: without a compiler or Triton, on parameters that a technique divides, on layers that are wrapped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels import adjacency, functions, products
from ridgeline.nn.kernels.backends import GatedKernel, NormKernel
from ridgeline.nn.kernels.dispatch import has_triton, usable
from ridgeline.nn.kernels.peaks import Wish, shared
from ridgeline.nn.kernels.products import ServedLinear, choose_served_products, is_linear, linear, served_linear
from ridgeline.nn.model.attention import Attention, by_heads, naive_attention, project
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.mlp import MLP, expand
from ridgeline.nn.model.norm import RMSNorm, compute_dtype
from ridgeline.nn.model.rotary import Rope, rotate
from ridgeline.nn.model.transformer import Transformer, TransformerBlock, add_then_norm
from ridgeline.nn.quant.codes import Stripes, bare
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import PackedExperts, expand_expert

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
    return torch.bmm(p, values).view(batch, heads, length, wide)


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


def lay_together(parts: list[nn.Module]) -> bool:
    """Make the weights of plain linears views of one storage; False if that is not possible."""
    return _product_of(parts) is not None and _adjoin([p.weight for p in parts])  # type: ignore[misc]


def _adjoin(tensors: list[Tensor], kind: type[Tensor] = nn.Parameter) -> bool:
    """Make tensors of this class views of one storage, if they are alike. Those that are stored elsewhere between uses
    have no memory of their own, and are given none: they arrive together."""
    if len({(t.dtype, t.requires_grad, type(t)) for t in tensors}) > 1 or type(tensors[0]) is not kind:
        return False
    if any(t.untyped_storage().nbytes() < t.nbytes for t in tensors):
        return True
    if adjacency.adjacent(tensors) is None:
        whole = torch.cat([t.detach().flatten() for t in tensors])
        for t, part in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
            t.data = part.view_as(t)
    return True


def _lay_codes_together(parts: list[nn.Module]) -> bool:
    """The same for the codes of packed ones, whose outputs are rows of the words and columns of the scales."""
    codes = _same_codes(parts)
    if codes is None or not _adjoin([c.words for c in codes]):
        return False
    for held in _scales(codes):
        if adjacency.adjacent_columns(held) is None:
            whole = torch.cat([t.detach() for t in held], 1)
            for t, part in zip(held, whole.split([t.shape[1] for t in held], 1), strict=True):
                t.data = part
    if adjacency.adjacent([c.arrived for c in codes]) is None:
        counters = torch.cat([c.arrived for c in codes])
        for c, part in zip(codes, counters.split([len(c.arrived) for c in codes]), strict=True):
            c.arrived = part
    return True


def _lay_rows_together(parts: list[nn.Module]) -> bool:
    """The same for layers that hold their weights in their own way."""
    if not _joinable(parts):
        return False
    for held in zip(*(p.rows() for p in parts), strict=True):  # type: ignore[operator]
        _adjoin(list(held), nn.Parameter if type(held[0]) is nn.Parameter else Tensor)
    return parts[0].joined(parts) is not None  # type: ignore[operator]


def _served_together(parts: list[nn.Module]) -> bool:
    """Whether projections of one input are one product from now on."""
    return _lay_rows_together(parts) or _lay_codes_together(parts) or lay_together(parts)


def fuse_served(model: Transformer) -> None:
    """Let a served model whose weights are on a GPU launch fewer kernels: merged projections, and residual additions
    within norms; and multiply one row by a kernel for that. Elsewhere nothing changes."""
    if not has_triton() or not all(p.is_cuda for p in model.parameters()):
        return
    fuse_elementwise(model)
    choose_served_products(model)
    join_served(model)


def join_served(model: Transformer) -> None:
    """Merge the projections of a served model that read one input."""
    for module in model.modules():
        if isinstance(module, Attention):
            parts: list[nn.Module] = [module.q_proj, module.k_proj, module.v_proj]
            normed = module.q_norm is not None and not (_joinable(parts) or _same_codes(parts))
            merged = not normed and _served_together(parts)
            module.project = partial(project_merged, known=_Known(parts)) if merged else module.project
        elif isinstance(module, MLP) and module.gate_proj is not None and module.activation == "silu":
            parts = [module.gate_proj, module.up_proj]
            merged = _served_together(parts)
            module.expand = partial(expand_merged, known=_Known(parts)) if merged else module.expand
        elif isinstance(module, PackedExperts) and module.activation == "silu" and module.gate_proj is not None:
            pairs = [list(pair) for pair in zip(module.gate_proj, module.up_proj, strict=True)]
            merged = module.gate_bias is module.up_bias is None and all(map(_served_together, pairs))
            known = [_Known(pair) for pair in pairs] if merged else []
            module.expand = partial(expand_merged_expert, known=known) if merged else module.expand
        else:
            continue
        if merged:
            torch.cuda.empty_cache()  # the parts' memory, which is too small for the next layer's whole


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _plain(module: nn.Module | None) -> bool:
    return is_linear(module) and not _hooked(module)


def _product_of(parts: list[nn.Module]) -> products.Product | None:
    """How linear layers that read one input multiply; None: not in the same way, or with hooks."""
    first = parts[0]
    if not isinstance(first, products.OwnProduct):
        served = all(type(p) is ServedLinear for p in parts)
        return (products.SERVED if served else products.PLAIN) if all(_plain(p) for p in parts) else None
    same = all(type(p) is type(first) and p.product is first.product for p in parts)
    return first.product if same and not any(map(_hooked, parts)) else None


def _same_codes(parts: list[nn.Module]) -> list[Stripes] | None:
    """The codes of packed linear layers that differ in their rows alone, and compute nothing else; None: others."""
    found = [p.codes for p in parts if type(p) is PackedLinear and p.fast and p.input is None and p.aside is None]
    codes = [c for c in found if type(c) is Stripes]
    if len(codes) < len(parts) or any(map(_hooked, parts)):
        return None
    kinds = {(c.bits, c.center, c.group, c.stripe, c.width, c.zero is None, c.scale.dtype) for c in codes}
    biased = {p.bias is None for p in parts}
    return codes if len(kinds) == len(biased) == 1 else None


def _joinable(parts: list[nn.Module]) -> bool:
    """Whether layers that hold their weights in their own way do so in the same one, without hooks."""
    alike = isinstance(parts[0], products.Joined) and {type(p) for p in parts} == {type(parts[0])}
    return alike and not any(map(_hooked, parts))


def _scales(codes: list[Stripes]) -> list[list[Tensor]]:
    """The scales of all parts, and their zeros if they have any."""
    zeros = [c.zero for c in codes if c.zero is not None]
    return [[c.scale for c in codes], *([zeros] if zeros else [])]


class _Known:
    """What the parts of a merged layer of a served model make together, as long as they are what they were. Found when
    the model is loaded: a step that is captured must not make what others read."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.whole: Any = None
        self._parts: list[tuple[nn.Module, type]] = []
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, int, int]] = []
        whole = _whole_layer(parts) or _whole_codes(parts) or _whole_weights(parts)
        if whole is not None:
            self._keep(parts, whole)

    def holds(self, parts: list[nn.Module]) -> bool:
        """Whether ``parts`` are these, of their classes and without hooks, and their tensors those that they were."""
        return (
            self.whole is not None
            and all(
                p is part and type(p) is kind and not (p._forward_hooks or p._forward_pre_hooks)
                for part, (p, kind) in zip(parts, self._parts, strict=True)
            )
            and all(where.get(name) is value for where, name, value in self._held)
            and all(t.data_ptr() == at and t._version == version for t, at, version in self._tensors)
        )

    def _keep(self, parts: list[nn.Module], whole: Any) -> None:
        """Remember ``whole``, where the parts' tensors can be told from others."""
        modules = [m for part in parts for m in part.modules()]
        self._parts = [(p, type(p)) for p in parts]
        self._held = [(where, name, value) for m in modules for where in (m._parameters, m._buffers, m._modules)
                      for name, value in where.items()]  # fmt: skip
        tensors = [value for _, _, value in self._held if isinstance(value, Tensor)]
        try:
            self._tensors = [(t, t.data_ptr(), t._version) for t in tensors]
        except RuntimeError:  # without data, or made in inference mode
            return
        if all(at for _, at, _ in self._tensors):
            self.whole = whole


def _whole_layer(parts: list[nn.Module]) -> products.Joined | None:
    """Layers that hold their weights in their own way as one; None if they do not lie together."""
    return parts[0].joined(parts) if _joinable(parts) else None  # type: ignore[operator]


def _joined(parts: list[nn.Module], known: _Known | None) -> products.Joined | None:
    """The same, as it is known or found anew, of a model that is not trained."""
    if not isinstance(parts[0], products.Joined) or torch.is_grad_enabled():
        return None
    return known.whole if known is not None and known.holds(parts) else _whole_layer(parts)


def _whole_codes(parts: list[nn.Module]) -> tuple[Stripes, Tensor | None] | None:
    """Packed weights that lie together as one, and their biases; None if they do not."""
    codes = _same_codes(parts)
    if codes is None:
        return None
    whole = bare(codes[0])
    whole._buffers = {}
    whole.out = sum(c.out for c in codes)
    words = adjacency.adjacent([c.words for c in codes])
    arrived = adjacency.adjacent([c.arrived for c in codes])
    scales = [adjacency.adjacent_columns(held) for held in _scales(codes)]
    if words is None or arrived is None or any(s is None for s in scales):
        return None
    vars(whole).update(words=words, arrived=arrived, scale=scales[0], zero=scales[1] if len(scales) > 1 else None)
    biases = [p.bias for p in parts]
    return whole, None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]


def _product_of_codes(x: Tensor, parts: list[nn.Module], known: _Known | None = None) -> Tensor | None:
    """``x`` [..., k] times packed weights that lie together, with their biases → [..., Σ n_i]; None if they do not."""
    if type(parts[0]) is not PackedLinear or torch.is_grad_enabled():
        return None
    found = known.whole if known is not None and known.holds(parts) else _whole_codes(parts)
    if found is None:
        return None
    whole, bias = found
    return whole.linear(x.reshape(-1, whole.width), bias).view(*x.shape[:-1], whole.out)


def _whole_weights(parts: list[nn.Module]) -> tuple[Tensor, Tensor | None, products.Product] | None:
    """(weight, bias, product) of layers whose weights lie together; None: they do not, or differ in their products."""
    product = _product_of(parts)
    whole = None if product is None else adjacency.adjacent([p.weight for p in parts])  # type: ignore[misc]
    if product is None or whole is None:
        return None
    biases = [p.bias for p in parts]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])  # type: ignore[operator]
    return whole, bias, product


def _merged(
    x: Tensor, parts: list[nn.Module], known: _Known | None = None
) -> tuple[Tensor, Tensor | None, products.Product] | None:
    """(weight, bias, product) of merged layers, plain ones' weight in the compute dtype; None if it cannot run."""
    dtype = compute_dtype(x)
    if known is not None and not torch.is_grad_enabled() and usable(x) and known.holds(parts):
        found: tuple[Tensor, Tensor | None, products.Product] = known.whole
        if x.is_cuda == found[0].is_cuda and dtype == found[0].dtype:
            return found
    product = _product_of(parts)
    if product is None or not usable(x, *(p.weight for p in parts), *(p.bias for p in parts)):  # type: ignore[arg-type]
        return None
    made = _whole_weights(parts)
    if made is None:
        return None
    whole, bias, _ = made
    bias = None if bias is None else bias.to(dtype)
    return whole.to(dtype) if product in (products.PLAIN, products.SERVED) else whole, bias, product


def project_merged(
    attention: Attention, x: Tensor, rope: Rope | None, known: _Known | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~ridgeline.nn.model.attention.project` by one product, whose result is rotated in place. ``known``: of
    this layer, of a served model."""
    parts: list[nn.Module] = [attention.q_proj, attention.k_proj, attention.v_proj]
    joined = _joined(parts, known)
    product = _product_of_codes(x, parts, known) if joined is None else joined(x)
    if product is not None:
        sizes: list[int] = [p.out_features for p in parts]  # type: ignore[misc]
        q, k, v = product.split(sizes, -1)
        return by_heads(attention, q, k, v, rope)
    found = _merged(x, parts, known)
    if found is None or (rope is not None and rope[0].shape[-1] < attention.head_dim):
        return project(attention, x, rope)
    merged, bias, how = found
    tensors: list[Tensor | None] = [*(p.weight for p in parts), *(p.bias for p in parts)]  # type: ignore[list-item]
    turned = None if attention.interleaved else rope
    q, k, v = functions.qkv(x.to(compute_dtype(x)), merged, bias, attention.head_dim, turned, tensors, how)
    if rope is not None and attention.interleaved:
        q, k = rotate(q, rope, True), rotate(k, rope, True)
    return (q if attention.query_scale == 1 else q * attention.query_scale), k, v


def expand_merged(mlp: MLP, x: Tensor, kernel: GatedKernel | None = None, known: _Known | None = None) -> Tensor:
    """:func:`~ridgeline.nn.model.mlp.expand` of a SwiGLU layer by one product. ``known`` as of
    :func:`project_merged`."""
    assert mlp.gate_proj is not None
    parts: list[nn.Module] = [mlp.gate_proj, mlp.up_proj]
    if (y := _gated_of_codes(x, parts, known)) is not None:
        return y
    found = _merged(x, parts, known)
    if found is None:
        return expand(mlp, x)
    merged, bias, product = found
    tensors: list[Tensor | None] = [*(p.weight for p in parts), *(p.bias for p in parts)]  # type: ignore[list-item]
    rows = x.to(compute_dtype(x)).flatten(0, -2)
    y = functions.gated_linear(shared(x, rows), merged, bias, tensors, kernel, product, _wish(mlp.down_proj))
    return shared(y, y.view(*x.shape[:-1], -1))


def expand_merged_expert(experts: PackedExperts, e: int, rows: Tensor, known: list[_Known]) -> Tensor:
    """:func:`~ridgeline.nn.quant.packed_model.expand_expert` of SwiGLU by one product."""
    assert experts.gate_proj is not None
    y = _gated_of_codes(rows, [experts.gate_proj[e], experts.up_proj[e]], known[e])
    return expand_expert(experts, e, rows) if y is None else y


def _gated_of_codes(x: Tensor, parts: list[nn.Module], known: _Known | None) -> Tensor | None:
    """SwiGLU of a product with codes that lie together; None if they do not."""
    if (joined := _joined(parts, known)) is not None:
        return joined.gated(x)
    both = _product_of_codes(x, parts, known)
    return None if both is None else functions.bias_activation(both, None, "silu")
