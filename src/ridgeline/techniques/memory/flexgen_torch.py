"""Weights and cache over three tiers, and the zig-zag schedule (FlexGen, arXiv:2303.06865, sections 4.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.memory.cache_tiers import CacheDisk, HostCache
from ridgeline.nn.memory.layer_stream import LayerStream, layer_tensors, size_of
from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import PAGE, mark_host
from ridgeline.nn.model.attention import CacheOf, LayerCache
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import RestingWeights


def spread_over_tiers(
    run: Build, layers: Sequence[str], caches: Sequence[Sequence[str]], folder: Path, ahead: int,
    hidden_on_host: bool = False,
) -> None:  # fmt: skip
    """``layers``: the tier of each layer's weights; ``caches``: those of the cache of each layer and part of the
    batch. Every layer takes the parts one after the other, while ``ahead`` layers and caches are fetched;
    ``hidden_on_host``: between layers, their hidden states rest in host memory."""
    _place_weights(run, layers, folder, ahead)
    run.model.cache_of = _Caches(run.model.cache_of, caches, folder, ahead)
    model, parts = run.model, len(caches[0])
    for block in model.layers.values():
        block.forward = partial(_by_parts, block.forward, parts, run.device, hidden_on_host)
    if hidden_on_host:
        for ends in (model.embed, model.norm):
            if ends is not None:
                ends.forward = partial(_by_parts, ends.forward, parts, run.device, hidden_on_host)
        if model.head is not None:
            model.head.register_forward_pre_hook(lambda _, args: (args[0].to(run.device), *args[1:]))


def _place_weights(run: Build, tiers: Sequence[str], folder: Path, ahead: int) -> None:
    names = [name for name in run.model.layers if tiers[int(name)] != "device"]
    if not names:
        return
    modules = [run.model.layers[name] for name in names]
    groups = [layer_tensors(module) for module in modules]
    on_disk = [tiers[int(name)] == "disk" for name in names]
    need = sum(size_of(group) + PAGE for group, disk in zip(groups, on_disk, strict=True) if disk)
    rest = {disk: RestingWeights(run, folder if disk else None, need) for disk in set(on_disk)}
    sources = [
        rest[disk].put(group, [(f"layers.{name}.{t.name}", None) for t in group])
        for name, group, disk in zip(names, groups, on_disk, strict=True)
    ]
    return_freed_memory()
    stream = LayerStream(groups, sources, run.device, ahead)
    stream.follow(modules)
    run.buffers += stream.tensors()


class PartedCache(LayerCache):
    """A layer's cache in parts, one for each part of the batch."""

    def __init__(self, parts: Sequence[LayerCache]) -> None:
        self.parts = parts

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that are stored."""
        return self.parts[0].length


class _Caches:
    """Makes the caches of a generation, layer by layer."""

    def __init__(self, inner: CacheOf, tiers: Sequence[Sequence[str]], folder: Path, ahead: int) -> None:
        self._inner, self._tiers = inner, tiers
        self._disk = CacheDisk(folder, ahead > 0)
        self._layer = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerCache:
        """The next layer's cache, [B, G, T, D]; after the last layer begins another generation."""
        tiers = self._tiers[self._layer]
        if not self._layer:
            self._disk.clear()
        self._layer = (self._layer + 1) % len(self._tiers)
        part = (shape[0] // len(tiers), *shape[1:])
        return PartedCache([self._made(tier, part, dtype, device) for tier in tiers])

    def _made(self, tier: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerCache:
        if tier == "disk":
            return self._disk.cache(shape, dtype)
        if tier == "host":
            return HostCache(self._inner(shape, dtype, torch.device("cpu")))
        return self._inner(shape, dtype, device)


def _by_parts(forward: Any, parts: int, device: torch.device, on_host: bool, x: Tensor, *args: Any) -> Tensor:
    """A module's pass over ``x`` [B, …], a part of the sequences at a time; of its other arguments, a cache has parts
    of its own. ``on_host``: the result rests in host memory."""
    size = x.shape[0] // parts
    out: Tensor | None = None
    for i in range(parts):
        rows = slice(i * size, (i + 1) * size)
        own = (a.parts[i] if isinstance(a, PartedCache) else a for a in args)
        y: Tensor = forward(x[rows].to(device), *own)
        if parts == 1 and not on_host:
            return y
        if out is None:
            out = y.new_empty((len(x), *y.shape[1:]), device="cpu" if on_host else device)
            if on_host:
                mark_host(out)
        out[rows] = y
    assert out is not None
    return out
