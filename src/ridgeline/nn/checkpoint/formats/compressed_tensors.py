"""compressed-tensors, ``pack-quantized``: what llm-compressor writes and transformers, vLLM and SGLang load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.formats import Get
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.spec.errors import UserError


class CompressedTensors:
    """``weight_packed`` int32 [out, in·bits/32] dense along the inputs, ``weight_scale`` [out, groups],
    ``weight_shape``, and for asymmetric weights ``weight_zero_point`` int32 packed along the outputs."""

    name = "compressed-tensors"

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self._groups: list[dict[str, Any]] = list((config or {}).get("config_groups", {}).values())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensors:
        """A reader. Raises :class:`UserError` for another storage format than pack-quantized."""
        kind = str(config.get("format", ""))
        if kind != "pack-quantized":
            raise UserError(f"compressed-tensors format {kind!r} is not read", "read: pack-quantized")
        return cls(config)

    def write(self, module: str, packed: Packed) -> dict[str, Tensor]:
        """See the class."""
        if packed.outliers is not None:
            raise UserError(f"{module} has outliers, which compressed-tensors cannot store",
                            "use --format ridgeline, or quantease with outliers=0")  # fmt: skip
        tensors = {
            f"{module}.weight_packed": pack_bits(packed.codes, packed.bits),
            f"{module}.weight_scale": packed.scale,
            f"{module}.weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
        }
        if packed.zero is not None:
            zeros = pack_bits(packed.zero.t().contiguous(), packed.bits)
            tensors[f"{module}.weight_zero_point"] = zeros.t().contiguous()
        return tensors

    def read(self, module: str, get: Get) -> Packed | None:
        """The inverse of :meth:`write`."""
        words = get(f"{module}.weight_packed")
        if words is None:
            return None
        scale, shape, zeros = (get(f"{module}.weight_{part}") for part in ("scale", "shape", "zero_point"))
        if scale is None or shape is None:
            raise UserError(f"{module} has weight_packed but no weight_scale or weight_shape", "write it again")
        out, width = shape.tolist()
        bits = words.shape[1] * 32 // width
        zero = None if zeros is None else unpack_bits(zeros.t().contiguous(), bits, out).t().contiguous()
        return Packed(unpack_bits(words, bits, width), scale, zero, bits, width // scale.shape[1])

    def input(self, module: str, get: Get) -> InputCode | None:
        """Of the group that names the module; a calibrated scale is the tensor ``input_scale``."""
        for group in self._groups:
            acts, targets = group.get("input_activations"), group.get("targets", [])
            if acts is None or not ("Linear" in targets or module in targets):
                continue
            scale = None if acts.get("dynamic") else get(f"{module}.input_scale")
            return InputCode(acts["num_bits"], None if scale is None else float(scale))
        return None

    def config(self, layers: Mapping[str, Packed], dense: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """One group per combination of bits, symmetry, group size and input quantization."""
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, packed in layers.items():
            whole = packed.group_size == packed.shape[1]
            code = inputs.get(name)
            if code is not None and code.threshold:
                code = None  # it cannot say that some inputs stay wide; all of them wide is the nearest it can say
            key = (packed.bits, packed.symmetric, None if whole else packed.group_size,
                   None if code is None else (code.bits, code.scale is None))  # fmt: skip
            groups[key].append(name)
        table = {}
        for i, ((bits, symmetric, group_size, code), names) in enumerate(groups.items()):
            weights = {
                "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None,
                "strategy": "channel" if group_size is None else "group", "group_size": group_size,
            }  # fmt: skip
            acts = None
            if code is not None:
                acts = {"num_bits": code[0], "type": "int", "symmetric": True, "dynamic": code[1],
                        "strategy": "token" if code[1] else "tensor"}  # fmt: skip
            table[f"group_{i}"] = {
                "targets": ["Linear"] if len(groups) == 1 else names, "weights": weights,
                "input_activations": acts, "output_activations": None,
            }  # fmt: skip
        return {
            "quant_method": self.name, "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": table, "ignore": dense,
        }  # fmt: skip
