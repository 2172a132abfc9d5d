"""Linear layers that read one input as one: their weights are laid together in memory, and multiplied at once.

Layers stay what they are, with parameters of their own. Whoever multiplies by the whole finds out first whether they
still lie together; of a served model that is found once and remembered (:class:`Known`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels import adjacency, products
from ridgeline.nn.kernels.dispatch import usable
from ridgeline.nn.kernels.products import ServedLinear, is_linear
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.nn.quant.codes import Stripes, bare
from ridgeline.nn.quant.packed_linear import PackedLinear


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


def lay_codes_together(parts: list[nn.Module]) -> bool:
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


def lay_served_together(parts: list[nn.Module]) -> bool:
    """Whether projections of one input are one product from now on."""
    return _lay_rows_together(parts) or lay_codes_together(parts) or lay_together(parts)


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


def held_alike(parts: list[nn.Module]) -> bool:
    """Whether layers hold weights other than plain ones, all in one way."""
    return _joinable(parts) or _same_codes(parts) is not None


def _scales(codes: list[Stripes]) -> list[list[Tensor]]:
    """The scales of all parts, and their zeros if they have any."""
    zeros = [c.zero for c in codes if c.zero is not None]
    return [[c.scale for c in codes], *([zeros] if zeros else [])]


class Site(Protocol):
    """What is added behind a product."""

    @property
    def on(self) -> bool:
        """Whether anything is."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``y`` [..., Σ n] with what belongs to its input ``x`` [..., k], in place where that can be."""
        ...


class Known:
    """What the parts of a merged layer of a served model make together, as long as they are what they were. Found when
    the model is loaded: a step that is captured must not make what others read."""

    def __init__(self, parts: list[nn.Module], whole: Any = None) -> None:
        """``whole``: what they are a part of, where that is known; None: to be found."""
        self.parts = parts
        self.whole: Any = None
        self.site: Site | None = None
        """What adapters add."""
        self._parts: list[tuple[nn.Module, type]] = []
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, int, int]] = []
        whole = whole or whole_layer(parts) or whole_codes(parts) or _whole_weights(parts)
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

    def product(self, x: Tensor) -> Tensor | None:
        """``x`` [..., k] times all parts, with their biases and what adapters add → [..., Σ n]; None: there are none
        now."""
        if self.site is None or not self.site.on:
            return None
        y = merged_product(x, self.parts, self)
        return self.site.add(x, torch.cat([p(x) for p in self.parts], -1) if y is None else y)

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


def whole_layer(parts: list[nn.Module]) -> products.Joined | None:
    """Layers that hold their weights in their own way as one; None if they do not lie together."""
    return parts[0].joined(parts) if _joinable(parts) else None  # type: ignore[operator]


def joined_layer(parts: list[nn.Module], known: Known | None) -> products.Joined | None:
    """The same, as it is known or found anew, of a model that is not trained."""
    if not isinstance(parts[0], products.Joined) or torch.is_grad_enabled():
        return None
    return known.whole if known is not None and known.holds(parts) else whole_layer(parts)


def whole_codes(parts: list[nn.Module]) -> tuple[Stripes, Tensor | None] | None:
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


def joined_codes_product(x: Tensor, parts: list[nn.Module], known: Known | None = None) -> Tensor | None:
    """``x`` [..., k] times packed weights that lie together, with their biases → [..., Σ n_i]; None if they do not."""
    if type(parts[0]) is not PackedLinear or torch.is_grad_enabled():
        return None
    found = known.whole if known is not None and known.holds(parts) else whole_codes(parts)
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


def merged_weights(
    x: Tensor, parts: list[nn.Module], known: Known | None = None
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


def merged_product(x: Tensor, parts: list[nn.Module], known: Known | None = None) -> Tensor | None:
    """``x`` [..., k] times parts of a served model, with their biases → [..., Σ n]; None: not by one product."""
    if (joined := joined_layer(parts, known)) is not None:
        y: Tensor = joined(x)
        return y
    found = joined_codes_product(x, parts, known)
    if found is None and (weights := merged_weights(x, parts, known)) is not None:
        weight, bias, product = weights
        found, _ = product.forward(x.to(compute_dtype(x)), weight, bias, False, False)
    return found
