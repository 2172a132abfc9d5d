"""Load and save Hugging Face checkpoints (config.json and safetensors files), one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ridgeline.nn.checkpoint.files import DTYPES, INDEX, SINGLE, Files, FileSpan, config_dtype, gguf_file
from ridgeline.nn.checkpoint.formats import Format
from ridgeline.nn.checkpoint.hf_names import NamePair, joined, links, stacked, whole_shape
from ridgeline.nn.model.init import allocate, assign
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.parallel.dtensor import is_dtensor
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Stored
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

# ---- reading ---------------------------------------------------------------------------------------------------------


def load_checkpoint(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """The model in the checkpoint directory ``path``, in ``dtype`` (default: the dtype in its config, else float32).

    Quantized weights of compressed checkpoints are dequantized. A GGUF file, or a directory that contains only one, is
    also read.

    Raises :class:`UserError` for any problem with the directory; the message names file and tensor.
    """
    path = Path(path)
    if (file := gguf_file(path)) is not None:
        from ridgeline.nn.checkpoint.formats.gguf import load_gguf  # it reads checkpoints, too

        return load_gguf(file, dtype or torch.float32).to(device)
    spec = ModelSpec.from_path(path)
    with torch.device("meta"):
        model = Transformer(spec)
    allocate(model, device, dtype or config_dtype(path))
    load_into(model, path)
    return model


@torch.no_grad()
def load_into(model: Transformer, path: str | Path) -> None:
    """Copy the checkpoint in directory ``path`` into ``model``: whole, one pipeline stage of it, or sharded.

    Only parameters of the architecture are read; others that the model has (adapters) keep their values. Tensors are
    read one at a time. Raises :class:`UserError` as :func:`load_checkpoint` does.
    """
    files = Files(Path(path))
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if model.spec.tie_embeddings and model.embed is None and model.head is not None:
        parameters["embed.tokens.weight"] = model.head.out.weight  # the last stage of a pipeline holds its own copy
    for ours, group in groupby(links(model.spec), key=lambda link: link.ours):
        if ours in parameters:
            parameter = parameters[ours]
            assign(parameter, _gather(files, list(group), tuple(parameter.shape)))


class Reader:
    """Single parameters of a checkpoint directory, by our names, for callers that cannot hold a whole model."""

    def __init__(
        self, path: str | Path, spec: ModelSpec, files: list[Path] | None = None, form: Format | None = None
    ) -> None:
        """``files``: some of the directory's, whose codes are in format ``form``; None: a whole checkpoint."""
        self._links = {ours: list(group) for ours, group in groupby(links(spec), key=lambda link: link.ours)}
        self._files = Files(Path(path), files, form)
        self._shapes = {p.name: p.shape for p in spec.parameters()}

    def packed(self, ours: str, expert: int | None = None) -> Stored | None:
        """A parameter's (or one expert's) codes; None where it is stored densely."""
        pieces = self._links[ours]
        if expert is not None and len(pieces) == 1:  # all experts in one tensor
            return self._files.blocks(pieces[0], expert)
        return self._files.packed(pieces[expert or 0])

    def input(self, ours: str, expert: int | None = None) -> InputCode | None:
        """How the input of a parameter's (or one expert's) layer is quantized; None: it is not."""
        pieces = self._links[ours]
        return self._files.input(pieces[0 if len(pieces) == 1 else expert or 0])

    def read_ahead(self) -> None:
        """Have the system read the files, without waiting for it."""
        for file in set(self._files.where.values()):
            with file.open("rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def span(self, ours: str, dtype: torch.dtype, expert: int | None = None) -> FileSpan | None:
        """Location of a parameter, or one expert's slice of it, if a file stores it exactly as used in ``dtype``; None
        if it must be converted or joined from several pieces."""
        pieces = self._links[ours]
        link = pieces[0 if len(pieces) == 1 else expert or 0]
        name = self._files.find(link)
        if (
            name is None
            or name not in self._files.where
            or (expert is None and len(pieces) > 1)
            or link.part
            or link.transpose
        ):
            return None
        found = self._files.span(name)
        expected = math.prod(self._shapes[ours][0 if expert is None else 1 :]) * dtype.itemsize
        usable = found.dtype == DTYPES.get(dtype) and found.length == expected and found.start % dtype.itemsize == 0
        return found if usable else None

    def read(self, ours: str, expert: int | None = None) -> Tensor:
        """A parameter as stored (dequantized to fp32), or one expert's slice of it.

        Raises :class:`UserError` for a missing, misshapen or unreadable tensor.
        """
        pieces, shape = self._links[ours], self._shapes[ours]
        if expert is None:
            return _gather(self._files, pieces, shape)
        if pieces[0].expert is None:  # all experts in one tensor
            return _gather(self._files, pieces, shape, expert)
        own = pieces[expert]
        if self._files.find(own) is not None or self._files.packed(own) is not None:
            return _gather(self._files, [own._replace(expert=None)], shape[1:])
        return _gather(self._files, pieces, shape)[expert]  # a layer's experts in one tensor


def _gather(files: Files, pieces: list[NamePair], shape: tuple[int, ...], at: int | None = None) -> Tensor:
    """Assemble one of our parameters from its pieces, each checked before anything is read; ``at``: of a lone piece,
    this place of its first dimension."""
    names = [files.find(link) for link in pieces]
    coded = [None if name else files.packed(link) for name, link in zip(names, pieces, strict=True)]
    if any(packed is not None for packed in coded):  # of a mixture's experts, possibly not all
        dense = []
        for packed, name, link in zip(coded, names, pieces, strict=True):
            if packed is not None:
                dense.append(packed.dense())
            elif name is not None:
                dense.append(files.read(name, link).float())
        whole = dense[0] if pieces[0].expert is None else torch.stack(dense)
        if len(dense) != len(pieces) or tuple(whole.shape) != tuple(shape):
            raise UserError(
                f"{pieces[0].theirs!r} in {files.names_of()} holds codes of shape {list(whole.shape)}, "
                f"config.json asks for {list(shape)}",
                "check that config.json belongs to these files",
            )
        return whole
    if files.find(pieces[0]) is None:
        # Stacked experts, as transformers ≥ 5 may write them. Names that neither layout has are reported as the hub's.
        other = [link for link in map(stacked, pieces) if link is not None]
        pieces = other if files.find(other[0]) is not None else pieces
    found: list[tuple[str, NamePair]] = []
    for link in pieces:
        name = files.find(link)
        if name is None:
            raise UserError(
                f"tensor {link.theirs!r} is missing in {files.names_of()}",
                "check that config.json belongs to these files",
            )
        wanted = whole_shape(link, shape if link.expert is None else shape[1:])
        if files.shape(name) != wanted:
            raise UserError(
                f"tensor {name!r} in {files.where[name]} has shape {list(files.shape(name))}, "
                f"config.json asks for {list(wanted)}",
                "check that config.json belongs to these files",
            )
        found.append((name, link))
    if pieces[0].expert is None:
        return files.read(*found[0], at)
    return torch.stack([files.read(*piece) for piece in found])


# ---- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(model: Transformer, path: str | Path, max_shard_bytes: float = 5e9) -> None:
    """Write ``model`` as a checkpoint that Hugging Face ``transformers`` loads, in files of up to ``max_shard_bytes``.

    A tensor larger than that gets a file of its own. Every file is written under a temporary name and then renamed, so
    that a crash leaves no half file; files of an earlier checkpoint in ``path`` that are not part of this one go.
    A sharded model is gathered tensor by tensor, for which every rank must call this; rank 0 writes.
    """
    path = Path(path)
    parameters = dict(model.named_parameters())
    tensors = _their_tensors(model.spec, parameters)
    config = {**to_hf_config(model.spec), "dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch.")}
    shards = _plan(tensors, max_shard_bytes)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        path.mkdir(parents=True, exist_ok=True)
    for file, names in shards.items():
        if writes:
            _write_shard(path / file, {n: tensors[n] for n in names}, parameters)
        else:
            for name in names:
                _join(tensors[name], parameters)
    if not writes:
        return
    sizes = {name: _nbytes(entry) for name, entry in tensors.items()}
    keep = set(shards)
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        _write_atomically(path / INDEX, [json.dumps(index, indent=2).encode()])
        keep.add(INDEX)
    _write_atomically(path / "config.json", [json.dumps(config, indent=2).encode()])
    for old in (*path.glob("model*.safetensors"), path / INDEX):
        if old.name not in keep:
            old.unlink(missing_ok=True)


Entry = tuple[tuple[int, ...], torch.dtype, list[NamePair]]
"""One of their tensors: shape, dtype, and the pieces it is joined from."""


def _their_tensors(spec: ModelSpec, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    for link in links(spec):
        if link.ours not in parameters:
            raise UserError(
                f"the model has no parameter {link.ours!r}",
                "save a whole model: no pipeline stage, no adapters or quantized layers still in place",
            )
        parameter = parameters[link.ours]
        if parameter.dtype not in DTYPES:
            raise UserError(
                f"parameter {link.ours!r} has dtype {parameter.dtype}, which is not saved", "cast the model"
            )
        shape = whole_shape(link, parameter.shape if link.expert is None else parameter.shape[1:])
        tensors.setdefault(link.theirs, (shape, parameter.dtype, []))[2].append(link)
    return tensors


def _nbytes(entry: Entry) -> int:
    return math.prod(entry[0]) * entry[1].itemsize


def _plan(tensors: dict[str, Entry], limit: float) -> dict[str, list[str]]:
    """File name → names of its tensors, assigned in model order."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, entry in tensors.items():
        size = _nbytes(entry)
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


@torch.no_grad()
def _join(entry: Entry, parameters: dict[str, torch.nn.Parameter]) -> Tensor:
    """One of their tensors, contiguous on the CPU."""
    pieces = []
    for link in entry[2]:
        tensor: Tensor = parameters[link.ours].detach()
        if is_dtensor(tensor):
            tensor = tensor.full_tensor()
        tensor = tensor if link.expert is None else tensor[link.expert]
        pieces.append(tensor.mT if link.transpose else tensor)
    return joined(pieces, entry[2][0].part).cpu().contiguous()


def _write_shard(file: Path, tensors: dict[str, Entry], parameters: dict[str, torch.nn.Parameter]) -> None:
    """The safetensors format, written as a stream: header length (u64), JSON header, then the tensors' bytes.

    The library's own writer wants all tensors of a file in memory at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in tensors.items():
        end = offset + _nbytes(entry)
        header[name] = {"dtype": DTYPES[entry[1]], "shape": list(entry[0]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned to 8 bytes

    def stream() -> Iterator[Any]:
        yield struct.pack("<Q", len(text))
        yield text
        for entry in tensors.values():
            yield _join(entry, parameters).flatten().view(torch.uint8).numpy()

    _write_atomically(file, stream())


def _write_atomically(file: Path, chunks: Any) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    try:
        with temporary.open("wb") as f:
            for chunk in chunks:
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(file)
    except OSError as e:
        raise UserError(f"cannot write {file}: {e.strerror or e}", "check the free space and the permissions") from None
    finally:
        temporary.unlink(missing_ok=True)
