"""Layers whose weights are stored off the device (ZeRO-Inference, arXiv:2207.00032, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import nn

from ridgeline.nn.memory.layer_stream import LayerStream, piece_sizes
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.mlp import MLP
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import rest_modules


def stream_modules(
    run: Build, names: Sequence[str], folder: Path | None, ahead: bool, room: Callable[[Sequence[Sequence[int]]], float]
) -> None:
    """Move this rank's part of the modules ``names``, of its layers, to host memory, or to disk if ``folder`` is given,
    and fetch them whenever they compute, if ``ahead`` as far in advance as there is ``room``: bytes on the device, of
    those of each layer's modules. Raises :class:`UserError` where the disk has no room, or a file cannot be read."""
    layers = run.model.layers
    names = list(dict.fromkeys(_called(layers, [name for name in names if name.partition(".")[0] in layers])))
    if not names:
        return
    groups, sources = rest_modules(run, names, [folder] * len(names))
    sizes: dict[str, list[int]] = {}
    for name, size in zip(names, piece_sizes(sources), strict=True):
        sizes.setdefault(name.partition(".")[0], []).append(size)
    capacity = int(room(list(sizes.values())))
    stream = LayerStream(groups, sources, run.device, len(groups) if ahead else 0, capacity)
    stream.follow([layers.get_submodule(name) for name in names])
    run.buffers += stream.tensors()


def _called(layers: nn.ModuleDict, names: Iterable[str]) -> Iterable[str]:
    """The modules ``names``; for those of a module that a technique has replaced, and that may use their weights
    without calling them, that module."""
    for name in names:
        parent = name.rpartition(".")[0]
        plain = "." not in parent or type(layers.get_submodule(parent)) in (Attention, MLP)
        yield name if plain else parent
