"""What a compression's journal stores about weights: their quantization schemes, without the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.compress.output import Output
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, PackedOutliers, Stored
from ridgeline.nn.quant.sparse import Sparse
from ridgeline.nn.quant.ternary import Ternary


def _describe_packed(stored: Packed) -> dict[str, Any]:
    outliers = 0 if stored.outliers is None else len(stored.outliers.index)
    return {"bits": stored.bits, "group_size": stored.group_size, "symmetric": stored.symmetric, "outliers": outliers}


def _restore_packed(scheme: dict[str, Any]) -> Packed:
    out, width = scheme["shape"]
    groups, count = width // scheme["group_size"], scheme["outliers"]
    zero = None if scheme["symmetric"] else torch.empty(out, groups, dtype=torch.uint8)
    outliers = PackedOutliers(torch.empty(count, dtype=torch.int32), torch.empty(count)) if count else None
    codes = torch.empty(out, width, dtype=torch.uint8)
    return Packed(codes, torch.empty(out, groups), zero, scheme["bits"], scheme["group_size"], outliers)


def _restore_sparse(scheme: dict[str, Any]) -> Sparse:
    out, width = scheme["shape"]
    return Sparse(torch.empty(out, -(-width // 32)), torch.empty(0), width)


def _restore_ternary(scheme: dict[str, Any]) -> Ternary:
    out, width = scheme["shape"]
    return Ternary(torch.empty(0), torch.empty(out + 1), torch.empty(out), torch.empty(out), width)


@dataclass(frozen=True)
class _Kind:
    name: str
    restore: Callable[[dict[str, Any]], Stored]
    describe: Callable[[Any], dict[str, Any]] = lambda stored: {}
    """What the journal stores in addition to the shape."""


_KINDS: dict[type, _Kind] = {
    Packed: _Kind("packed", _restore_packed, _describe_packed),
    Sparse: _Kind("bitmask", _restore_sparse),
    Ternary: _Kind("ternary", _restore_ternary),
}
_BY_NAME = {kind.name: kind for kind in _KINDS.values()}


def scheme_of(stored: Stored) -> dict[str, Any]:
    """A stored weight's entry in the config."""
    kind = _KINDS[type(stored)]
    return {"kind": kind.name, "shape": list(stored.shape), **kind.describe(stored)}


def from_scheme(scheme: dict[str, Any]) -> Stored:
    """The inverse of :func:`scheme_of`, with tensors on the meta device."""
    with torch.device("meta"):
        return _BY_NAME[scheme["kind"]].restore(scheme)


def journal_schemes(output: Output) -> tuple[dict[str, Stored], dict[str, InputCode]]:
    """The stored weights (on the meta device) and the quantized inputs of all modules, from the journal."""
    stored: dict[str, Stored] = {}
    inputs: dict[str, InputCode] = {}
    for part in output.journal["parts"].values():
        stored.update({module: from_scheme(scheme) for module, scheme in part.get("packed", {}).items()})
        inputs.update({module: InputCode(**code) for module, code in part.get("inputs", {}).items()})
    return stored, inputs
