"""Measured attention kernels: ``device,phase,dtype,kv_dtype,batch,q_len,kv_len,n_heads,n_kv_heads,head_dim,…``."""

from __future__ import annotations

from ridgeline.graph.graph import Op
from ridgeline.predict.operators.kernel import op_time, peak_flops
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import BadCell, CsvRow
from ridgeline.validate.dtypes import dtype_of
from ridgeline.validate.nouns import device_of

NAME = "attention"
PHASES = ("prefill", "decode")
REQUIRED = ("device", "phase", "batch", "q_len", "kv_len", "n_heads", "n_kv_heads", "head_dim", "seconds")


def op_of(row: CsvRow) -> Op:
    """The operator of one row; the kernel library is the one that its source names."""
    dtype = dtype_of(row, "dtype", "bf16")
    kv_dtype = dtype_of(row, "kv_dtype", dtype)
    batch, q_len, kv_len = row.count("batch"), row.count("q_len"), row.count("kv_len")
    heads, dim = row.count("n_heads"), row.count("head_dim")
    kv_heads = row.count("n_kv_heads", heads)
    if heads % kv_heads:
        raise BadCell(f"column 'n_kv_heads': {kv_heads} does not divide n_heads {heads}")
    if q_len > kv_len:
        raise BadCell(f"column 'kv_len': {kv_len} is less than q_len {q_len}")
    causal = row.flag("causal", True)
    keys = 2.0 * batch * kv_heads * kv_len * dim * DTYPE_BYTES[kv_dtype]
    queries = 2.0 * batch * heads * q_len * dim * max(2.0, DTYPE_BYTES[dtype])
    source = row.text("source", "").lower()
    return Op(
        "attention", "attention", "attention", flops=4.0 * batch * heads * q_len * kv_len * dim, bytes=keys + queries,
        dtype=dtype, shape=(batch, heads, kv_heads, q_len, kv_len, dim), causal=causal, kv_dtype=kv_dtype,
        kernel="trtllm" if "trt" in source else "flash",
        reuse=keys + queries if "aiconfigurator" in source else 0.0,  # one cache, read again in every replay
    )  # fmt: skip


def cases(row: CsvRow) -> list[Case]:
    """The row's prediction beside its measurement. Raises :class:`BadCell` or :class:`UserError`."""
    device = device_of(row)
    measured = row.number("seconds", above=0)
    phase = row.text("phase").lower()
    if phase not in PHASES:  # a backward pass would be judged as a forward one
        raise BadCell(f"column 'phase': {phase!r} is neither {' nor '.join(PHASES)}")
    op = op_of(row)
    timed = op_time(op, device)
    _, _, _, q_len, kv_len, _ = op.shape
    visible = 1.0 - (q_len - 1) / (2.0 * kv_len) if op.causal else 1.0
    terms = (visible * op.flops / peak_flops(device, op.dtype), op.bytes / device.memory_bandwidth, 1.0)
    return [
        Case(
            group=f"{device.name} {phase} {op.kv_dtype}", quantity="seconds", measured=measured,
            predicted=timed.seconds, why=timed.bound, terms=terms, line=row.line, spread=timed.spread,
            source=timed.source,
            label=f"{phase} (batch, heads, kv heads, q, kv, dim) {op.shape} {op.dtype}/{op.kv_dtype} on {device.name}",
        )
    ]  # fmt: skip
