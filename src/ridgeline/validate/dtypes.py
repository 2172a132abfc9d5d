"""The names that data sets give to number formats, as Ridgeline's."""

from __future__ import annotations

from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.validate.table import BadCell, Row

_NAMES = {
    "half": "fp16", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32",
    "f32": "fp32", "double": "fp64", "float8": "fp8", "fp8_e4m3": "fp8", "e4m3": "fp8", "fp8_e5m2": "fp8",
    "fp8_block": "fp8", "w8a8": "int8",
}  # fmt: skip
_WEIGHT_ONLY = {"int8_wo": "int8", "w8a16": "int8", "int4_wo": "int4", "w4a16": "int4"}
"""Formats of which only the weights are narrow: products run in bf16."""


def dtype_of(row: Row, column: str, default: str | None = None) -> str:
    """The number format of a cell. Raises :class:`BadCell` for one that is not known."""
    text = row.text(column, default).lower()
    name = "bf16" if text in _WEIGHT_ONLY else _NAMES.get(text, text)
    if name not in DTYPE_BYTES:
        raise BadCell(f"column {column!r}: dtype {text!r} is not known")
    return name


def weight_dtype_of(row: Row, column: str) -> str:
    """The number format of the weights where it differs from the operands', else empty."""
    return _WEIGHT_ONLY.get(row.text(column, "").lower(), "")
