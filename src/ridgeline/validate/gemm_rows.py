"""Measured matrix multiplications: ``device,dtype,m,n,k,seconds``. 8-bit rows include scaling the activations.

What a ``source`` column tells: aiconfigurator replays a few copies of one layer, whose weights a large cache may hold;
DeepGEMM's own benchmarks flush the cache and give operands that are 8 bits wide already.
"""

from __future__ import annotations

from math import ceil

from ridgeline.graph.graph import Op
from ridgeline.predict.operators.kernel import op_time, peak_flops
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import CsvRow
from ridgeline.validate.dtypes import dtype_of, weight_dtype_of
from ridgeline.validate.nouns import device_of

_COPIES, _COPIES_VLLM = 5, 6
"""Copies of a layer that aiconfigurator's graphs go through in turn: no more than overflow the cache, or always six."""

NAME = "gemm"
REQUIRED = ("device", "dtype", "m", "n", "k", "seconds")


def ops(row: CsvRow) -> list[Op]:
    """The operators of one row: the product, and before it the scaling of 8-bit activations."""
    dtype = dtype_of(row, "dtype")
    m, n, k = row.count("m"), row.count("n"), row.count("k")
    weight = weight_dtype_of(row, "dtype")
    width = DTYPE_BYTES[dtype]
    moved = m * k * width + n * k * DTYPE_BYTES[weight or dtype] + m * n * max(2.0, width)
    product = Op("gemm", "mlp", "gemm", flops=2.0 * m * n * k, bytes=moved, dtype=dtype, shape=(m, n, k),
                 weight_dtype=weight, reuse=_reuse(row, n * k * DTYPE_BYTES[weight or dtype]))  # fmt: skip
    source = row.text("source", "").lower()
    if dtype != "fp8" or "deepgemm" in source or "infersim" in source:
        return [product]
    return [Op("quantize", "mlp", "quantize", bytes=3.0 * m * k, dtype="fp8"), product]


def _reuse(row: CsvRow, weights: float) -> float:
    """Bytes of weights between two uses of one: of all copies that are multiplied in turn; 0: the cache is cold."""
    source = row.text("source", "").lower()
    if "aiconfigurator" not in source:
        return 0.0
    if "vllm" in source:
        return _COPIES_VLLM * weights
    return min(_COPIES, ceil(device_of(row).l2_bytes / weights)) * weights


def cases(row: CsvRow) -> list[Case]:
    """The row's prediction beside its measurement. Raises :class:`BadCell` or :class:`UserError`."""
    device = device_of(row)
    measured = row.number("seconds", above=0)
    parts = ops(row)
    timed = [op_time(op, device) for op in parts]
    product = parts[-1]
    seconds = sum(t.seconds for t in timed)
    terms = (product.flops / peak_flops(device, product.dtype), product.bytes / device.memory_bandwidth, 1.0)
    m, n, k = product.shape
    name = f"{product.dtype}/{product.weight_dtype}" if product.weight_dtype else product.dtype
    return [
        Case(
            group=f"{device.name} {name}", quantity="seconds", measured=measured, predicted=seconds,
            label=f"{m}x{n}x{k} {name} on {device.name}", terms=terms, why=timed[-1].bound, line=row.line,
            spread=timed[-1].spread, source=timed[-1].source,
        )
    ]  # fmt: skip
