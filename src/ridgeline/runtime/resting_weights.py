"""Weights that are stored off the device in groups: in host memory, in the checkpoint's own files, or in a new file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.checkpoint import Reader
from ridgeline.nn.checkpoint.files import FileSpan
from ridgeline.nn.memory.layer_stream import (
    FileRange,
    FileSource,
    HostSource,
    LayerTensor,
    OpenFile,
    Scratch,
    Source,
    layer_tensors,
    size_of,
)
from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import PAGE, mark_host
from ridgeline.runtime.build import Build

Name = tuple[str, int | None]
"""A parameter by our name and, for stacked experts, the expert's index."""
_GAP = 1 << 20
"""Tensors that are at most this many bytes apart in a file are read together."""


class RestingWeights:
    """Where the weights of one model are stored off the device."""

    def __init__(self, run: Build, folder: Path | None, need: int) -> None:
        """``folder``: on the disk where weights are stored; None: in host memory. ``need``: bytes to be stored there if
        the checkpoint's own files cannot be used."""
        self.device, self.folder, self._need = run.device, folder, need
        source = getattr(run.experiment.workload, "checkpoint", None)
        meta = any(p.is_meta for p in run.model.parameters())
        self._reader = Reader(source, run.experiment.model) if meta and source else None
        self._files: dict[Path, OpenFile] = {}
        self._scratch: Scratch | None = None

    def put(self, tensors: list[LayerTensor], names: Sequence[Name]) -> Source:
        """Store a group of tensors and free their memory; ``tensors`` have the source's layout.

        Those on the meta device are read from the checkpoint by their ``names``, or stay in its files if these store
        all of them in the required form.
        """
        source: Source | None = None
        if self.folder is not None and self._reader is not None and all(_held(t).is_meta for t in tensors):
            spans = [self._reader.span(ours, t.dtype, e) for t, (ours, e) in zip(tensors, names, strict=True)]
            source = self._in_place(tensors, spans)
        if source is None:
            flat = self._packed(tensors, names)
            if self.folder is None:
                source = HostSource(flat)
            else:
                self._scratch = self._scratch or Scratch(self.folder, self._need)
                source = self._scratch.write(flat)
        for t in tensors:
            t.unbind(self.device)
        return source

    def _in_place(self, tensors: list[LayerTensor], spans: Sequence[FileSpan | None]) -> FileSource | None:
        """The group as ranges of the checkpoint's files; None if these do not store a tensor in the required form."""
        found = [(span, i) for i, span in enumerate(spans) if span is not None]
        if len(found) < len(tensors):
            return None
        ranges: list[FileRange] = []
        for span, i in sorted(found, key=lambda pair: pair[0][:2]):
            file = self._files.get(span.file) or self._files.setdefault(span.file, OpenFile.of(span.file))
            first, end = span.start // PAGE * PAGE, span.start + span.length
            last = ranges[-1] if ranges else None
            if last is not None and last.file is file and first <= last.start + last.length + _GAP:
                first, place = last.start, last.place
                ranges.pop()
            else:
                place = 0 if last is None else last.place + last.length
            ranges.append(FileRange(file, first, -(-(end - first) // PAGE) * PAGE, end - first, place))
            tensors[i] = replace(tensors[i], offset=place + span.start - first)
        return FileSource(ranges)

    def _packed(self, tensors: Sequence[LayerTensor], names: Sequence[Name]) -> Tensor:
        """A group's bytes in host memory, uint8 [size]."""
        pinned = self.device.type == "cuda"
        flat = mark_host(torch.empty(size_of(tensors), dtype=torch.uint8, pin_memory=pinned))
        with torch.no_grad():
            for t, (ours, expert) in zip(tensors, names, strict=True):
                held = _held(t)
                if held.is_meta:
                    assert self._reader is not None
                    held = self._reader.read(ours, expert)
                t.view(flat).copy_(held)
        return flat


def rest_modules(
    run: Build, names: Sequence[str], folders: Sequence[Path | None]
) -> tuple[list[list[LayerTensor]], list[Source]]:
    """Store the modules ``names`` of the model's layers ("3", or "3.mlp.up_proj"), each in its folder's file or (None)
    in host memory, and free their memory → the tensors of each, and where they are. One at a time is read, where
    loading left that for later. Raises :class:`UserError` where a folder cannot be written or has too little space, or
    a file of the checkpoint cannot be read."""
    modules = [run.model.layers.get_submodule(name) for name in names]
    elements = [sum(p.numel() for p in module.parameters()) for module in modules]
    groups: list[list[LayerTensor]] = []
    sources: list[Source] = []
    rest: dict[Path | None, RestingWeights] = {}
    for name, folder, count in zip(names, folders, elements, strict=True):
        run.model.complete(name.partition(".")[0])
        tensors = layer_tensors(run.model.layers.get_submodule(name))
        if folder not in rest:
            mine = [n for n, other in zip(elements, folders, strict=True) if other == folder]
            need = round(size_of(tensors) * sum(mine) / max(1, count)) + PAGE * len(mine)
            rest[folder] = RestingWeights(run, folder, need)
        sources.append(rest[folder].put(tensors, [(f"layers.{name}.{t.name}", None) for t in tensors]))
        groups.append(tensors)
        return_freed_memory()  # or what codes took while they were read adds up
    return groups, sources


def _held(t: LayerTensor) -> Tensor:
    tensor: Tensor = getattr(t.owner, t.name.rpartition(".")[2])
    return tensor
