"""Data sets' names of number formats, mapped to Ridgeline's."""

from __future__ import annotations

import re

from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.validate.csv_table import BadCell, CsvRow

_NAMES = {
    "half": "fp16", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32",
    "f32": "fp32", "double": "fp64", "float64": "fp64", "float8": "fp8", "fp8_e4m3": "fp8", "e4m3": "fp8",
    "fp8_e5m2": "fp8", "fp8_block": "fp8", "fp8_static": "fp8", "fp8_ootb": "fp8", "w8a8": "int8", "uint8": "int8",
    "char": "int8", "int32": "fp32", "uint32": "fp32", "int64": "fp64", "uint64": "fp64",
}  # fmt: skip
_WEIGHT_ONLY = {"int8_wo": "int8", "w8a16": "int8", "int4_wo": "int4", "w4a16": "int4"}
"""Formats of which only the weights are narrow: products run in bf16."""


def dtype_of(row: CsvRow, column: str, default: str | None = None) -> str:
    """The number format of a cell. Raises :class:`BadCell` for one that is not known."""
    text = row.text(column, default).lower().replace("-", "_").removeprefix("torch.")
    name = "bf16" if text in _WEIGHT_ONLY else _NAMES.get(text, text)
    if name not in DTYPE_BYTES:
        raise BadCell(f"column {column!r}: dtype {text!r} is not known")
    return name


def precision_of(row: CsvRow, column: str, default: str) -> str:
    """The format a training run computes in: fp8, fp16, bf16, tf32 or fp32, out of names like ``bf16-mixed``.

    Raises :class:`BadCell` for a name without one.
    """
    text = row.text(column, default).lower()
    found = re.search(r"bf(?:loat)?16|(?:fp|float|f)(8|16|32)|tf32|half|16", text)
    if found is None:
        raise BadCell(f"column {column!r}: precision {text!r} is not known")
    if found[1]:
        return f"fp{found[1]}"
    return {"tf32": "tf32", "half": "fp16", "16": "fp16"}.get(found[0], "bf16")


def weight_dtype_of(row: CsvRow, column: str) -> str:
    """The number format of the weights where it differs from the operands', else empty."""
    return _WEIGHT_ONLY.get(row.text(column, "").lower(), "")
