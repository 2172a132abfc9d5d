"""Our own format: stores every kind of record exactly, including those that no other format can express."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.formats import Get
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, PackedOutliers, Stored, pack_bits, unpack_bits
from ridgeline.nn.quant.sparse import Sparse
from ridgeline.nn.quant.ternary import PAIRS, WORDS, ZEROS, Ternary
from ridgeline.spec.errors import UserError

VERSION = 1
_PACKED = ("weight_packed", "weight_scale")
_SPARSE = ("weight_mask", "weight_values")
_TERNARY = ("weight_codes", "weight_offsets", "weight_low", "weight_high")


class Ridgeline:
    """Integers: ``weight_packed`` int32 dense along the inputs, ``weight_scale`` [out, groups], ``weight_zero_point``
    packed along the outputs if asymmetric, ``weight_outlier_index`` and ``weight_outlier_value`` if any are kept aside,
    ``weight_layout`` int64 (out, in, bits, group size). Ternary words: ``weight_codes`` int16, ``weight_offsets``
    int32 [out + 1], ``weight_low`` and ``weight_high`` [out], ``weight_layout`` (out, in). Pruned weights:
    ``weight_mask`` int32 [out, in/32], ``weight_values`` [non-zeros], ``weight_layout`` (out, in)."""

    name = "ridgeline"

    def __init__(self, inputs: Mapping[str, InputCode] | None = None) -> None:
        """``inputs``: how modules' inputs are quantized, by module name."""
        self._inputs = inputs or {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Ridgeline:
        """A reader. Raises :class:`UserError` for another version or dictionary."""
        version, book = config.get("version"), config.get("dictionary", _dictionary())
        if version != VERSION or book != _dictionary():
            raise UserError(f"ridgeline format of version {version} with dictionary {book} is not read",
                            f"read: version {VERSION} with dictionary {_dictionary()}")  # fmt: skip
        return cls({module: InputCode(**code) for module, code in config.get("inputs", {}).items()})

    def write(self, module: str, packed: Stored, code: InputCode | None = None) -> dict[str, Tensor]:
        """See the class."""
        if isinstance(packed, Ternary):
            parts = dict(zip(_TERNARY, (packed.codes, packed.offsets, packed.low, packed.high), strict=True))
            layout = list(packed.shape)
        elif isinstance(packed, Sparse):
            parts = dict(zip(_SPARSE, (packed.mask, packed.values), strict=True))
            layout = list(packed.shape)
        elif isinstance(packed, Packed):
            parts = dict(zip(_PACKED, (pack_bits(packed.codes, packed.bits), packed.scale), strict=True))
            layout = [*packed.shape, packed.bits, packed.group_size]
            if packed.zero is not None:
                parts["weight_zero_point"] = pack_bits(packed.zero.t().contiguous(), packed.bits)
            if packed.outliers is not None:
                parts["weight_outlier_index"] = packed.outliers.index
                parts["weight_outlier_value"] = packed.outliers.values
        else:
            raise TypeError(f"no layout for {type(packed).__name__}")
        parts["weight_layout"] = torch.tensor(layout, dtype=torch.int64)
        return {f"{module}.{name}": tensor for name, tensor in parts.items()}

    def read(self, module: str, get: Get) -> Packed | Ternary | Sparse | None:
        """The inverse of :meth:`write`. Raises :class:`UserError` where a part is missing."""
        layout = get(f"{module}.weight_layout")
        if layout is None:
            return None
        sizes = layout.tolist()

        def part(name: str) -> Tensor:
            found = get(f"{module}.{name}")
            if found is None:
                raise UserError(f"{module} has weight_layout but no {name}", "write the checkpoint again")
            return found

        if len(sizes) == 2 and get(f"{module}.{_SPARSE[0]}") is not None:
            mask, values = (part(name) for name in _SPARSE)
            return Sparse(mask, values, sizes[1])
        if len(sizes) == 2:
            codes, offsets, low, high = (part(name) for name in _TERNARY)
            return Ternary(codes, offsets, low, high, sizes[1])
        out, width, bits, group_size = sizes
        words, scale = (part(name) for name in _PACKED)
        zeros, index = get(f"{module}.weight_zero_point"), get(f"{module}.weight_outlier_index")
        zero = None if zeros is None else unpack_bits(zeros, bits, out).t().contiguous()
        aside = None if index is None else PackedOutliers(index, part("weight_outlier_value"))
        return Packed(unpack_bits(words, bits, width), scale, zero, bits, group_size, aside)

    def input(self, module: str, get: Get) -> InputCode | None:
        """As recorded in the config."""
        return self._inputs.get(module)

    def config(self, layers: Mapping[str, Stored], dense: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """How many modules are stored in which way; the tensors themselves carry the details.

        No ``quant_method``: with one that it does not know, transformers warns and goes on with random weights; without
        one it refuses.
        """
        names = {Ternary: "ternary", Sparse: "bitmask"}
        kinds = Counter(f"{la.bits}-bit" if isinstance(la, Packed) else names[type(la)] for la in layers.values())
        config: dict[str, Any] = {"method": self.name, "version": VERSION, "modules": dict(sorted(kinds.items())),
                                  "ignore": dense}  # fmt: skip
        if "ternary" in kinds:
            config["dictionary"] = _dictionary()
        if inputs:
            config["inputs"] = {module: asdict(code) for module, code in inputs.items()}
        return config


def _dictionary() -> dict[str, Any]:
    return {"words": WORDS, "pairs": PAIRS, "zeros": ZEROS}
