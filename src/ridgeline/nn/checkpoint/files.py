"""The files of a Hugging Face checkpoint: which there are, and any tensor's bytes in our layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.nn.checkpoint.formats import Format, reader
from ridgeline.nn.checkpoint.hf_names import NamePair, spellings
from ridgeline.nn.quant import mxfp4
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, Stored
from ridgeline.spec.errors import UserError
from ridgeline.spec.json_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DAMAGED = "download or save the checkpoint again"


def gguf_file(path: Path) -> Path | None:
    """``path`` itself if it is a GGUF file, or the only one in a directory without safetensors."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 and not any(path.glob("*.safetensors")) else None


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of the directory ``path``; empty where there is none. Raises :class:`UserError` for a damaged
    one."""
    return read_json(path / "config.json")


def config_dtype(path: Path) -> torch.dtype:
    """The dtype of the weights according to the checkpoint's config; float32 if it does not say."""
    config = read_config(path)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return dtype if dtype in DTYPES else torch.float32


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that appears whole, with the permissions of any new file.

    Raises :class:`OSError` or :class:`SafetensorError` when there is no room.
    """
    draft = file.with_name(f".{file.name}.partial")
    try:
        draft.unlink(missing_ok=True)
        draft.touch()
        mode = draft.stat().st_mode
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, draft, metadata={"format": "pt"})
        draft.chmod(mode)  # the library lets the owner alone read its files
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


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
_SCALE = "_scale"
"""End of the name of the scales of a weight's codes, where these have the weight's own name (compressed-tensors)."""
_BLOCK_SCALES = "_scale_inv"
"""End of the name of the factors that an fp8 weight's blocks are multiplied by (DeepSeek-V3, Qwen3-FP8)."""


class Files:
    """The tensors of a checkpoint directory by name, and the file that contains each."""

    def __init__(self, path: Path, files: list[Path] | None = None, form: Format | None = None) -> None:
        self.path = path
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        if not path.is_dir():
            raise UserError(f"no checkpoint directory at {path}", "give the directory that holds config.json")
        quantized = read_config(path).get("quantization_config") if files is None else None
        self.format = reader(quantized) if files is None else form
        self._block: list[int] = (quantized or {}).get("weight_block_size") or [128, 128]
        self.where: dict[str, Path] = {}
        for file in self._all(path) if files is None else files:
            if not file.is_file():
                raise UserError(f"{path / INDEX} names the shard {file.name}, which does not exist", DAMAGED)
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
            raise UserError(f"{index} is not a usable index: {e}", DAMAGED) from None
        if not isinstance(weight_map, dict):
            raise UserError(f"{index} is not a usable index: its weight_map is not an object", DAMAGED)
        return weight_map

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as e:
                cut = first_missing(file)
                what = f"{file} is truncated: tensor {cut!r} is not whole" if cut else f"{file} is damaged: {e}"
                raise UserError(what, DAMAGED) from None
        return self._open[file]

    def names_of(self) -> str:
        """The files, for a message."""
        files = sorted({f.name for f in self.where.values()})
        return f"{self.path / files[0]}" if len(files) == 1 else f"{self.path} ({', '.join(files)})"

    def find(self, link: NamePair) -> str | None:
        """The name under which the checkpoint has ``link``'s tensor, or the blocks that it is expanded from; None for
        the codes of a format."""
        names = (n for n in spellings(link.theirs) if n in self.where or f"{n}{_BLOCKS}" in self.where)
        return next((n for n in names if self.format is None or f"{n}{_SCALE}" not in self.where), None)

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
            raise UserError(f"tensor {name!r} in {self.where[name]} cannot be read: {e}", DAMAGED) from None

    def _expanded(self, name: str) -> Tensor:
        """A mixture's weights [E, in, out] from MXFP4 blocks, which gpt-oss stores by output."""
        blocks, scales = self.tensor(f"{name}{_BLOCKS}"), self.tensor(f"{name}{_SCALES}")
        if blocks is None or scales is None:
            raise UserError(f"{self.names_of()} holds {name}{_BLOCKS} but no {name}{_SCALES}", DAMAGED)
        return mxfp4.expand(blocks, scales).mT

    def _scaled(self, name: str) -> Tensor:
        """A weight [out, in] from fp8 and one factor per block of it, in bf16."""
        handle, scales = self._handle(self.where[name]), self.tensor(f"{name}{_BLOCK_SCALES}")
        weight = handle.get_tensor(name).float()
        assert scales is not None
        for dim, size in enumerate(self._block):
            if scales.shape[dim] != -(-weight.shape[dim] // size):
                raise UserError(f"{name}{_BLOCK_SCALES} in {self.names_of()} has {list(scales.shape)} factors for"
                                f" blocks of {self._block} in {list(weight.shape)}", DAMAGED)  # fmt: skip
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
