"""Saved activations kept in host memory between a layer's forward and its backward (vDNN, arXiv:1602.08124)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ridgeline.nn.memory.tiered_store import TieredStore, making, mark_host, on_host
from ridgeline.runtime.train_build import TrainBuild


class HeldStorage:
    """One storage that autograd keeps: on the device, on the host, or (when it is needed soon) on both.

    Only autograd's handles refer to it, so it is freed when the last operator that needs it has run.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.host: Tensor | None = None
        self.arrive: Callable[[], None] = lambda: None
        """Waits for the copy to the device."""


@dataclass(frozen=True)
class Handle:
    """What autograd keeps instead of a tensor."""

    held: HeldStorage
    layer: SavedLayer
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, shape and strides within the storage."""


@dataclass(eq=False)
class SavedLayer:
    """The activations that one forward of one layer saved."""

    store: TieredStore
    device: torch.device
    before: SavedLayer | None
    """The layer whose backward comes next."""
    skip: set[int]
    """Storages that are not offloaded: parameters, and what all layers share."""
    weights: set[tuple[int, ...]]
    """Shapes in which matrix products read the weights."""
    open: dict[int, HeldStorage] = field(default_factory=dict)
    kept: list[weakref.ref[HeldStorage]] = field(default_factory=list)

    def pack(self, t: Tensor) -> Any:
        """Called when autograd saves ``t``."""
        storage = t.untyped_storage()
        if type(t) is not Tensor or storage._cdata in self.skip or not t.numel() or _is_cast(t, self.weights):
            return t
        held = self.open.get(storage._cdata)
        if held is None:
            held = self.open[storage._cdata] = HeldStorage(storage, self.device)
        return Handle(held, self, t.dtype, (int(t.storage_offset()), t.shape, t.stride()))

    def unpack(self, kept: Any) -> Tensor:
        """Called when autograd needs it back."""
        if not isinstance(kept, Handle):
            return kept  # type: ignore[no-any-return]
        kept.layer.fetch()
        kept.held.arrive()
        assert kept.held.device is not None
        storage = kept.held.device.untyped_storage()
        return torch.empty(0, dtype=kept.dtype, device=self.device).set_(storage, *kept.place)

    @torch.no_grad()
    def leave(self) -> None:
        """After the layer's forward: copy everything to the host."""
        held = list(self.open.values())
        self.open.clear()
        self.kept = [weakref.ref(h) for h in held]
        with on_host():
            hosts = [mark_host(torch.empty(h.device.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
                     for h in held if h.device is not None]  # fmt: skip
        if held:
            self.store.copy("d2h", hosts, [h.device for h in held if h.device is not None])
        for h, host in zip(held, hosts, strict=True):
            h.host, h.device = host, None

    @torch.no_grad()
    def fetch(self) -> None:
        """Before its backward: copy everything that is still needed back to the device."""
        away = [h for h in (ref() for ref in self.kept) if h is not None and h.device is None]
        if not away:
            return
        with making("activations"):
            for h in away:
                assert h.host is not None
                h.device = torch.empty(h.host.shape, dtype=torch.uint8, device=self.device)
        arrive = self.store.copy("h2d", [h.device for h in away if h.device is not None],
                                 [h.host for h in away if h.host is not None])  # fmt: skip
        for h in away:
            h.host, h.arrive = None, arrive

    def back(self, _: Tensor) -> None:
        """When the layer's backward begins: fetch its activations, and those of the layer whose backward is next."""
        self.fetch()
        if self.before is not None:
            self.before.fetch()


def _is_cast(t: Tensor, weights: set[tuple[int, ...]]) -> bool:
    """Whether ``t`` is autocast's low-precision copy of a weight, transposed: of a trained weight, or of a frozen one
    (no history)."""
    base = t if t._base is None else t._base
    node = base.grad_fn
    if node is not None:
        if node.name() != "ToCopyBackward0":
            return False
        return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)
    return t.ndim == 2 and t.dtype != torch.float32 and t.stride(0) == 1 < t.stride(1) and tuple(t.shape) in weights


def _storages(tensors: Iterable[Any]) -> set[int]:
    found = (getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, Tensor))
    return {t.untyped_storage()._cdata for t in found}


def offload_layers(run: TrainBuild, store: TieredStore) -> None:
    """Wrap the forward of every layer of the model."""
    last: list[SavedLayer | None] = [None]

    def forward(inner: Callable[..., Tensor], block: nn.Module, first: bool, x: Tensor, *shared: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return inner(x, *shared)
        weights = {tuple(p.shape[::-1]) for p in block.parameters()}
        skip = _storages(block.parameters()) | _storages(tree_iter(shared))
        layer = SavedLayer(store, run.device, None if first else last[0], skip, weights)
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
            out = inner(x, *shared)
        layer.leave()
        last[0] = layer
        if out.requires_grad:
            out.register_hook(layer.back)
        return out

    for chunk in run.chunks:
        for i, block in enumerate(chunk.model.layers.values()):
            block.forward = partial(forward, block.forward, block, i == 0)
