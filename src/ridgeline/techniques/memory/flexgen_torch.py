"""Weights, cache and hidden states over three tiers, and the zig-zag schedule (FlexGen, arXiv:2303.06865, sections 4.1
and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.cache_tiers import CacheDisk, HostCache
from ridgeline.nn.memory.hidden_tiers import HiddenStates
from ridgeline.nn.memory.layer_stream import LayerStream, piece_sizes
from ridgeline.nn.memory.tiered_store import mark_host
from ridgeline.nn.model.attention import CacheOf, LayerCache
from ridgeline.nn.model.transformer import TransformerBlock
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import rest_modules

Step = tuple[Callable[..., Tensor], Callable[[], AbstractContextManager[None]]]
"""What all parts of the batch pass through, and while what is held."""


def spread_over_tiers(
    run: Build, weights: Mapping[str, str], caches: Sequence[Sequence[str]], hidden: Sequence[str], folder: Path,
    ahead: int, room: Callable[[Sequence[float]], float],
) -> None:  # fmt: skip
    """``weights``: the tier of those modules of the layers that are not on the device; ``caches``: those of the cache
    of each layer and part of the batch; ``hidden``: those of each part's hidden states between two modules. Every
    module takes the parts one after the other, while ``ahead`` modules, caches and hidden states are fetched, the
    modules into ``room`` bytes of the device, of those of each."""
    stream, names = _place_weights(run, weights, folder, ahead, room)
    run.model.cache_of = _Caches(run.model.cache_of, caches, folder, ahead)
    model, states = run.model, HiddenStates(hidden, folder, run.device, ahead > 0)
    if len(hidden) == 1 and hidden[0] == "device":
        if stream is not None:
            stream.follow([model.layers.get_submodule(name) for name in names])
        for block in model.layers.values():
            block.forward = partial(_whole, block.forward)
        return
    assert model.embed is not None
    index = {name: i for i, name in enumerate(names)}

    def held(name: str) -> AbstractContextManager[None]:
        return nullcontext() if stream is None or name not in index else stream.held(index[name])

    modules: list[tuple[nn.Module, list[Step]]] = [(model.embed, [(model.embed.forward, nullcontext)])]
    for i, block in model.layers.items():
        found = passes(block).items()
        modules.append((block, [(forward, partial(held, f"{i}.{part}" if part else i)) for part, forward in found]))
    for module, steps in modules:
        module.forward = partial(_by_parts, steps, states)
    last = model.norm if model.norm is not None else model.head
    assert last is not None
    last.forward = partial(_together, last.forward, states)
    if model.head is not None and last is not model.head:
        model.head.register_forward_pre_hook(lambda _, args: (args[0].to(run.device), *args[1:]))


def passes(block: nn.Module) -> dict[str, Callable[..., Tensor]]:
    """What all parts of the batch pass through one after the other, by the module of the layer whose weights it uses;
    "": the layer."""
    if not isinstance(block, TransformerBlock) or not block.in_two or "forward" in vars(block):
        return {"": block.forward}
    return {"attention": block.attend, "mlp": lambda x, *_: block.feed(x)}


def _place_weights(
    run: Build, weights: Mapping[str, str], folder: Path, ahead: int, room: Callable[[Sequence[float]], float]
) -> tuple[LayerStream | None, list[str]]:
    """The stream of the modules that are not on the device, and their names in its order."""
    layers = run.model.layers
    tiers: dict[str, str] = {}
    for name, tier in weights.items():
        layer = name.partition(".")[0]
        if layer in layers:
            tiers[layer if "" in passes(layers[layer]) else name] = tier
    if not tiers:
        return None, []
    names = list(tiers)
    groups, sources = rest_modules(run, names, [folder if tier == "disk" else None for tier in tiers.values()])
    stream = LayerStream(groups, sources, run.device, ahead, int(room(piece_sizes(sources))))
    run.buffers += stream.tensors()
    return stream, names


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


def _own(args: Sequence[Any], part: int) -> list[Any]:
    """A part's arguments: of them, a cache has parts of its own."""
    return [a.parts[part] if isinstance(a, PartedCache) else a for a in args]


def _whole(forward: Any, x: Tensor, *args: Any) -> Tensor:
    """A layer's pass over a batch that is not divided."""
    out: Tensor = forward(x, *_own(args, 0))
    return out


def _by_parts(steps: Sequence[Step], states: HiddenStates, x: Tensor | HiddenStates, *args: Any) -> HiddenStates:
    """The pass of a module's ``steps`` over ``x`` (token ids [B, S], or hidden states), a part of the sequences at a
    time while each step's weights are there."""
    for forward, held in steps:
        with held():
            size = 0 if isinstance(x, HiddenStates) else len(x) // len(states.tiers)
            for i in range(len(states.tiers)):
                read = x[i] if isinstance(x, HiddenStates) else x[i * size : (i + 1) * size]
                states[i] = forward(read, *_own(args, i))
        x = states
    return states


def _together(forward: Any, states: HiddenStates, x: HiddenStates) -> Tensor:
    """The last module's pass: its outputs in one tensor [B, …], on the device if all hidden states are there."""
    out: Tensor | None = None
    outside = any(tier != "device" for tier in states.tiers)
    for i in range(len(states.tiers)):
        y: Tensor = forward(x[i])
        if out is None:
            out = y.new_empty((len(y) * len(states.tiers), *y.shape[1:]), device="cpu" if outside else y.device)
            if outside:
                mark_host(out)
        out[i * len(y) : (i + 1) * len(y)] = y
    states.clear()
    assert out is not None
    return out
