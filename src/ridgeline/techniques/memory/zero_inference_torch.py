"""Layers whose weights are stored off the device (ZeRO-Inference, arXiv:2207.00032, section 6)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ridgeline.nn.memory.layer_stream import LayerStream, layer_tensors, size_of
from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import PAGE
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import RestingWeights


def stream_layers(run: Build, streamed: Collection[int], folder: Path | None, ahead: int) -> None:
    """Move this rank's part of the layers ``streamed`` to host memory, or to disk if ``folder`` is given, and fetch
    them whenever they compute, prefetching ``ahead`` layers."""
    names = [name for name in run.model.layers if int(name) in streamed]
    if not names:
        return
    modules = [run.model.layers[name] for name in names]
    layers = [layer_tensors(module) for module in modules]
    rest = RestingWeights(run, folder, sum(size_of(layer) + PAGE for layer in layers))
    sources = [
        rest.put(layer, [(f"layers.{name}.{t.name}", None) for t in layer])
        for name, layer in zip(names, layers, strict=True)
    ]
    return_freed_memory()
    stream = LayerStream(layers, sources, run.device, ahead)
    stream.follow(modules)
    run.buffers += stream.tensors()
