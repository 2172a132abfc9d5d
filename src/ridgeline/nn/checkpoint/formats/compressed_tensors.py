"""compressed-tensors, ``pack-quantized`` and ``int-quantized``: what llm-compressor writes and transformers, vLLM and
SGLang load."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.formats import Get
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.spec.errors import UserError

PACKED, INTEGERS, MIXED = "pack-quantized", "int-quantized", "mixed-precision"


class CompressedTensors:
    """Of layers whose inputs are not quantized (pack-quantized): ``weight_packed`` int32 [out, in·bits/32] dense along
    the inputs, ``weight_scale`` [out, groups], ``weight_shape``, and for asymmetric weights ``weight_zero_point`` int32
    packed along the outputs. Of the others (int-quantized): ``weight`` int8 [out, in], a byte each whatever the bits,
    ``weight_scale`` and ``weight_zero_point`` int8 [out, groups]; codes and zero points are less 2^(bits-1)."""

    name = "compressed-tensors"

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self._groups: list[dict[str, Any]] = list((config or {}).get("config_groups", {}).values())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensors:
        """A reader. Raises :class:`UserError` for another storage format."""
        kinds = [str(config.get("format", ""))]
        if kinds == [MIXED]:
            kinds = [str(group.get("format")) for group in config.get("config_groups", {}).values()]
        for kind in kinds:
            if kind not in (PACKED, INTEGERS):
                raise UserError(f"compressed-tensors format {kind!r} is not read", f"read: {PACKED}, {INTEGERS}")
        return cls(config)

    def write(self, module: str, packed: Packed, code: InputCode | None = None) -> dict[str, Tensor]:
        """See the class."""
        if packed.outliers is not None:
            raise UserError(f"{module} has outliers, which compressed-tensors cannot store",
                            "use --format ridgeline, or quantease with outliers=0")  # fmt: skip
        if _stated(code) is not None:
            found = {"weight": _signed(packed.codes, packed.bits), "weight_scale": packed.scale}
            if packed.zero is not None:
                found["weight_zero_point"] = _signed(packed.zero, packed.bits)
            return {f"{module}.{name}": t for name, t in found.items()}
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
        scale, shape, zeros = (get(f"{module}.weight_{part}") for part in ("scale", "shape", "zero_point"))
        if words is None:
            codes = None if scale is None else get(f"{module}.weight")
            if scale is None or codes is None or codes.dtype != torch.int8:
                return None
            bits = next((int(group["weights"]["num_bits"]) for group in self._of(module)), 8)
            zero = None if zeros is None else _unsigned(_per_row(zeros, len(codes)), bits)
            scale = _per_row(scale, len(codes))
            return Packed(_unsigned(codes, bits), scale, zero, bits, codes.shape[1] // scale.shape[1])
        if scale is None or shape is None:
            raise UserError(f"{module} has weight_packed but no weight_scale or weight_shape", "write it again")
        out, width = shape.tolist()
        bits = words.shape[1] * 32 // width
        zero = None if zeros is None else unpack_bits(zeros.t().contiguous(), bits, out).t().contiguous()
        return Packed(unpack_bits(words, bits, width), scale, zero, bits, width // scale.shape[1])

    def input(self, module: str, get: Get) -> InputCode | None:
        """Of the group that names the module; a calibrated scale is the tensor ``input_scale``. Raises
        :class:`UserError` for one with a zero point."""
        for group in self._of(module):
            acts = group.get("input_activations")
            if acts is None:
                continue
            names = (f"{module}.input_{part}" for part in ("scale", "zero_point"))
            scale, zero = (None if acts.get("dynamic") else get(name) for name in names)
            if zero is not None and bool(zero.any()):
                raise UserError(f"{module} has an input_zero_point, and inputs are quantized symmetrically here",
                                "use a checkpoint with symmetric input_activations")  # fmt: skip
            return InputCode(acts["num_bits"], None if scale is None else float(scale))
        return None

    def _of(self, module: str) -> list[dict[str, Any]]:
        """The groups that name a module: by its name, by that of its class, or by a pattern (``re:``)."""

        def named(target: str) -> bool:
            pattern = target.removeprefix("re:")
            return target in ("Linear", module) or (pattern != target and re.match(pattern, module) is not None)

        return [group for group in self._groups if any(map(named, group.get("targets", [])))]

    def config(self, layers: Mapping[str, Packed], dense: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """One group per combination of bits, symmetry, group size and input quantization."""
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, packed in layers.items():
            whole = packed.group_size == packed.shape[1]
            code = _stated(inputs.get(name))
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
                "input_activations": acts, "output_activations": None, "format": INTEGERS if acts else PACKED,
            }  # fmt: skip
        kinds = {group["format"] for group in table.values()}
        return {
            "quant_method": self.name, "format": kinds.pop() if len(kinds) == 1 else MIXED,
            "quantization_status": "compressed", "config_groups": table, "ignore": dense,
        }  # fmt: skip


def _stated(code: InputCode | None) -> InputCode | None:
    """How inputs are quantized as far as the format can say it: not that some stay wide, for which all of them do."""
    return None if code is None or code.threshold else code


def _per_row(grid: Tensor, rows: int) -> Tensor:
    """Scales or zero points [rows, groups], also where the whole weight has one (strategy tensor)."""
    return grid.reshape(1, 1).repeat(rows, 1) if grid.numel() == 1 else grid.reshape(rows, -1)


def _signed(codes: Tensor, bits: int) -> Tensor:
    return codes.to(torch.int16).sub_(2 ** (bits - 1)).to(torch.int8)


def _unsigned(codes: Tensor, bits: int) -> Tensor:
    return codes.to(torch.int16).add_(2 ** (bits - 1)).to(torch.uint8)
