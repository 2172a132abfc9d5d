"""Layers whose weights are stored off the device (ZeRO-Inference, arXiv:2207.00032, section 6)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ridgeline.nn.memory.layer_stream import LayerStream
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import rest_layers


def stream_layers(run: Build, streamed: Collection[int], folder: Path | None, ahead: int) -> None:
    """Move this rank's part of the layers ``streamed`` to host memory, or to disk if ``folder`` is given, and fetch
    them whenever they compute, prefetching ``ahead`` layers."""
    names = [name for name in run.model.layers if int(name) in streamed]
    if not names:
        return
    modules = [run.model.layers[name] for name in names]
    layers, sources = rest_layers(run, names, [folder] * len(names))
    stream = LayerStream(layers, sources, run.device, ahead)
    stream.follow(modules)
    run.buffers += stream.tensors()
