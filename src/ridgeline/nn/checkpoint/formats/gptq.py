"""The GPTQ checkpoint format of AutoGPTQ and GPTQModel, which transformers, vLLM (Marlin) and exllama load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.checkpoint.formats import Get
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.spec.errors import UserError

V1, V2 = "gptq", "gptq_v2"
"""How zero points are stored: minus one, or unchanged. The first cannot represent a zero point of 0."""


class GPTQFormat:
    """``qweight`` int32 [in·bits/32, out] packed along the inputs, ``scales`` fp16 [groups, out], ``qzeros`` int32
    [groups, out·bits/32] packed along the outputs, ``g_idx`` int32 [in]: the group of each input."""

    name = "gptq"

    def __init__(self, bits: int = 0, version: str = V1) -> None:
        self.bits, self.version = bits, version

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GPTQFormat:
        """A reader."""
        version = str(config.get("checkpoint_format", V1))
        if version not in (V1, V2):
            raise UserError(f"GPTQ checkpoint_format {version!r} is not read", f"read: {V1}, {V2}")
        return cls(int(config["bits"]), version)

    def write(self, module: str, packed: Packed, code: InputCode | None = None) -> dict[str, Tensor]:
        """See the class. Symmetric weights in version 1, others in version 2."""
        out, width = packed.shape
        if packed.outliers is not None:
            raise UserError(f"{module} has outliers, which the GPTQ format cannot store",
                            "use --format ridgeline, or quantease with outliers=0")  # fmt: skip
        if packed.bits not in (2, 3, 4, 8) or out % 32 or width % 32:
            raise UserError(
                f"the GPTQ format cannot hold {module}: {packed.bits} bits, shape [{out}, {width}]",
                "it has 2, 3, 4 or 8 bits and sizes that 32 divides; use --format compressed-tensors",
            )
        zero = packed.zero
        if zero is None:
            zero = torch.full((out, packed.scale.shape[1]), (1 << (packed.bits - 1)) - 1, dtype=torch.uint8)
        return {
            f"{module}.qweight": pack_bits(packed.codes, packed.bits).t().contiguous(),
            f"{module}.scales": packed.scale.t().contiguous().to(torch.float16),
            f"{module}.qzeros": pack_bits(zero.t().contiguous(), packed.bits),
            f"{module}.g_idx": (torch.arange(width) // packed.group_size).to(torch.int32),
        }

    def read(self, module: str, get: Get) -> Packed | None:
        """The inverse of :meth:`write`. Raises :class:`UserError` for groups that an activation order scattered."""
        words = get(f"{module}.qweight")
        if words is None:
            return None
        scales, zeros, groups = (get(f"{module}.{part}") for part in ("scales", "qzeros", "g_idx"))
        if scales is None or zeros is None:
            raise UserError(f"{module} has qweight but no scales or qzeros", "download the checkpoint again")
        width, out = words.shape[0] * 32 // self.bits, words.shape[1]
        group = width // scales.shape[0]
        if groups is not None and not torch.equal(groups.long(), torch.arange(width) // group):
            raise UserError(f"{module} was quantized with desc_act, its groups are scattered", "use desc_act=False")
        zero = unpack_bits(zeros, self.bits, out).t().contiguous()
        if self.version == V1:
            zero = (zero + 1) & ((1 << self.bits) - 1)
        middle = bool((zero == 1 << (self.bits - 1)).all())
        codes = unpack_bits(words.t().contiguous(), self.bits, width)
        return Packed(codes, scales.t().contiguous(), None if middle else zero, self.bits, group)

    def input(self, module: str, get: Get) -> InputCode | None:
        """None: the format is for weights only."""
        return None

    def config(self, layers: Mapping[str, Packed], dense: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """One scheme for all layers, as the format requires. Raises :class:`UserError` for several."""
        if inputs:
            raise UserError("the GPTQ format holds weights only, this plan quantizes inputs too",
                            "use --format compressed-tensors")  # fmt: skip
        schemes = {(p.bits, p.group_size if p.group_size != p.shape[1] else -1, p.symmetric) for p in layers.values()}
        if len(schemes) > 1:
            raise UserError(f"the GPTQ format has one scheme for all layers, this plan made {len(schemes)}",
                            "use --format compressed-tensors")  # fmt: skip
        ((bits, group_size, symmetric),) = schemes
        return {
            "quant_method": self.name, "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": False,
            "static_groups": True, "lm_head": False, "pack_dtype": "int32",
            "checkpoint_format": V1 if symmetric else V2,
        }  # fmt: skip
