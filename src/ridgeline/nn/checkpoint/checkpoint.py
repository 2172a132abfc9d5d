"""Load and save Hugging Face checkpoints (config.json and safetensors files), one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch import distributed as dist

from ridgeline.nn.checkpoint.formats import Format, reader
from ridgeline.nn.checkpoint.hf_names import NamePair, joined, links, spellings, stacked, whole_shape
from ridgeline.nn.model.init import allocate, assign
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.parallel.dtensor import is_dtensor
from ridgeline.nn.quant import mxfp4
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, Stored
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_AGAIN = "download or save the checkpoint again"

# ---- reading ---------------------------------------------------------------------------------------------------------


def first_missing(file: Path) -> str | None:
    """The first tensor of a truncated safetensors file whose bytes are incomplete; None when its header is damaged.

    The file begins with the header's length (8 bytes, little endian) and the header, a JSON object of tensor names with
    their byte ranges after it.
    """
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
        there = file.stat().st_size - 8 - length
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, MemoryError):
        return None
    cut = sorted((end, name) for name, end in ends.items() if end > there)
    return cut[0][1] if cut else None


class FileSpan(NamedTuple):
    """Consecutive bytes of a file."""

    file: Path
    start: int
    length: int
    dtype: str
    """As safetensors spells it."""


_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of MXFP4 codes and exponents."""
_BLOCK_SCALES = "_scale_inv"
"""End of the name of the factors that an fp8 weight's blocks are multiplied by (DeepSeek-V3, Qwen3-FP8)."""


class _Files:
    """The tensors of a checkpoint directory by name, and the file that contains each."""

    def __init__(self, path: Path, files: list[Path] | None = None, form: Format | None = None) -> None:
        self.path = path
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        if not path.is_dir():
            raise UserError(f"no checkpoint directory at {path}", "give the directory that holds config.json")
        quantized = _config(path).get("quantization_config") if files is None else None
        self.format = reader(quantized) if files is None else form
        self._block: list[int] = (quantized or {}).get("weight_block_size") or [128, 128]
        self.where: dict[str, Path] = {}
        for file in self._all(path) if files is None else files:
            if not file.is_file():
                raise UserError(f"{path / INDEX} names the shard {file.name}, which does not exist", _AGAIN)
            self.where.update(dict.fromkeys(self._handle(file).keys(), file))

    @classmethod
    def _all(cls, path: Path) -> list[Path]:
        if (path / SINGLE).is_file():
            return [path / SINGLE]
        if (path / INDEX).is_file():
            return sorted({path / str(name) for name in cls._weight_map(path / INDEX).values()})
        raise UserError(f"no {SINGLE} and no {INDEX} in {path}", "only safetensors checkpoints are read")

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{index} is not a usable index: {e}", _AGAIN) from None
        if not isinstance(weight_map, dict):
            raise UserError(f"{index} is not a usable index: its weight_map is not an object", _AGAIN)
        return weight_map

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as e:
                cut = first_missing(file)
                what = f"{file} is truncated: tensor {cut!r} is not whole" if cut else f"{file} is damaged: {e}"
                raise UserError(what, _AGAIN) from None
        return self._open[file]

    def names_of(self) -> str:
        """The files, for a message."""
        files = sorted({f.name for f in self.where.values()})
        return f"{self.path / files[0]}" if len(files) == 1 else f"{self.path} ({', '.join(files)})"

    def find(self, link: NamePair) -> str | None:
        """The name under which the checkpoint has ``link``'s tensor, or the blocks that it is expanded from."""
        return next((n for n in spellings(link.theirs) if n in self.where or f"{n}{_BLOCKS}" in self.where), None)

    def tensor(self, name: str) -> Tensor | None:
        """A whole tensor by its name in the files; None when there is none."""
        return self.read(name, NamePair("", name)) if name in self.where else None

    def packed(self, link: NamePair) -> Stored | None:
        """``link``'s weight, if the checkpoint has it quantized."""
        if self.format is None or not link.theirs.endswith(".weight"):
            return None
        modules = (name.removesuffix(".weight") for name in spellings(link.theirs))
        found = (self.format.read(module, self.tensor) for module in modules)
        return next((p for p in found if p is not None), None)

    def blocks(self, link: NamePair, expert: int) -> Packed | None:
        """One expert's part of a mixture's weights in MXFP4, as ``link`` maps them; None where they are not."""
        name = self.find(link)
        if name is None or name in self.where:
            return None
        codes, scales = (self._handle(self.where[f"{name}{end}"]).get_slice(f"{name}{end}")[expert]
                         for end in (_BLOCKS, _SCALES))  # fmt: skip
        if link.part is not None:  # of every group of rows, those of one of our projections
            first, count, of, _, groups = link.part
            codes, scales = (t.unflatten(0, (groups, of, -1))[:, first : first + count].flatten(0, 2)
                             for t in (codes, scales))  # fmt: skip
        return mxfp4.packed(codes, scales)

    def input(self, link: NamePair) -> InputCode | None:
        """How the input of the layer that ``link``'s weight belongs to is quantized."""
        if self.format is None:
            return None
        modules = (name.removesuffix(".weight") for name in spellings(link.theirs))
        found = (self.format.input(module, self.tensor) for module in modules)
        return next((code for code in found if code is not None), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``."""
        if name not in self.where:
            *stack, out, count, _ = self.shape(f"{name}{_BLOCKS}")
            return (*stack, count * mxfp4.BLOCK, out)
        return tuple(self._handle(self.where[name]).get_slice(name).get_shape())

    def span(self, name: str) -> FileSpan:
        """Location of the tensor ``name``, which is stored as it is."""
        file = self.where[name]
        if file not in self._headers:
            with file.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                self._headers[file] = length + 8, json.loads(f.read(length))
        start, header = self._headers[file]
        first, end = header[name]["data_offsets"]
        return FileSpan(file, start + first, end - first, header[name]["dtype"])

    def read(self, name: str, link: NamePair, at: int | None = None) -> Tensor:
        """The part of tensor ``name`` that ``link`` maps, in our layout; ``at``: of its first dimension this one."""
        if name not in self.where:
            return self._cut(self._expanded(name), link, at)
        if f"{name}{_BLOCK_SCALES}" in self.where:
            return self._cut(self._scaled(name), link)
        try:
            return self._cut(self._handle(self.where[name]).get_slice(name), link, at)
        except (SafetensorError, OSError) as e:
            raise UserError(f"tensor {name!r} in {self.where[name]} cannot be read: {e}", _AGAIN) from None

    def _expanded(self, name: str) -> Tensor:
        """A mixture's weights [E, in, out] from MXFP4 blocks, which gpt-oss stores by output."""
        blocks, scales = self.tensor(f"{name}{_BLOCKS}"), self.tensor(f"{name}{_SCALES}")
        if blocks is None or scales is None:
            raise UserError(f"{self.names_of()} holds {name}{_BLOCKS} but no {name}{_SCALES}", _AGAIN)
        return mxfp4.expand(blocks, scales).mT

    def _scaled(self, name: str) -> Tensor:
        """A weight [out, in] from fp8 and one factor per block of it, in bf16."""
        handle, scales = self._handle(self.where[name]), self.tensor(f"{name}{_BLOCK_SCALES}")
        weight = handle.get_tensor(name).float()
        assert scales is not None
        for dim, size in enumerate(self._block):
            if scales.shape[dim] != -(-weight.shape[dim] // size):
                raise UserError(f"{name}{_BLOCK_SCALES} in {self.names_of()} has {list(scales.shape)} factors for"
                                f" blocks of {self._block} in {list(weight.shape)}", _AGAIN)  # fmt: skip
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        expanded: Tensor = (weight * scales).bfloat16()
        return expanded

    @staticmethod
    def _cut(piece: Any, link: NamePair, at: int | None = None) -> Tensor:
        """``link``'s part of a tensor, or of a slice that has not been read yet."""
        shape = piece.shape if isinstance(piece, Tensor) else piece.get_shape()
        cut: list[slice] = [slice(None)] * len(shape)
        if at is not None:
            cut[0] = slice(at, at + 1)
        if link.part is None:
            tensor: Tensor = piece[tuple(cut) or ...]
        else:
            first, count, of, dim, groups = link.part
            step = shape[dim] // (of * groups)
            if groups == 1:
                cut[dim] = slice(first * step, (first + count) * step)
            tensor = piece[tuple(cut)]
            if groups > 1:
                split = tensor.unflatten(dim, (groups, of, step))
                tensor = split.narrow(dim + 1, first, count).flatten(dim, dim + 2)
        tensor = tensor if at is None else tensor[0]
        return tensor.mT if link.transpose else tensor


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


def gguf_file(path: Path) -> Path | None:
    """``path`` itself if it is a GGUF file, or the only one in a directory without safetensors."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 and not any(path.glob("*.safetensors")) else None


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config if isinstance(config, dict) else {}


def config_dtype(path: Path) -> torch.dtype:
    """The dtype of the weights according to the checkpoint's config; float32 if it does not say."""
    config = _config(path)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return dtype if dtype in _DTYPES else torch.float32


@torch.no_grad()
def load_into(model: Transformer, path: str | Path) -> None:
    """Copy the checkpoint in directory ``path`` into ``model``: whole, one pipeline stage of it, or sharded.

    Only parameters of the architecture are read; others that the model has (adapters) keep their values. Tensors are
    read one at a time. Raises :class:`UserError` as :func:`load_checkpoint` does.
    """
    files = _Files(Path(path))
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
        self._files = _Files(Path(path), files, form)
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
        usable = found.dtype == _DTYPES.get(dtype) and found.length == expected and found.start % dtype.itemsize == 0
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


def _gather(files: _Files, pieces: list[NamePair], shape: tuple[int, ...], at: int | None = None) -> Tensor:
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
        if parameter.dtype not in _DTYPES:
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
        header[name] = {"dtype": _DTYPES[entry[1]], "shape": list(entry[0]), "data_offsets": [offset, end]}
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
