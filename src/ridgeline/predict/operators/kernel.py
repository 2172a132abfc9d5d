"""Operator time: a measured rate where there is one, otherwise the model for the operator's kind with the device's
datasheet.

Matrix multiplications are in ``gemm.py``, fused attention in ``attention_time.py``, collectives in
``collective_time.py``; all other operators are bounded by the bytes they move. On a CPU without measured rates a plain
roofline is used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ridgeline.graph.graph import LATENT, Op
from ridgeline.predict.machine import Machine, machine
from ridgeline.predict.operators.attention_time import attention_time
from ridgeline.predict.operators.codes import codes_seconds
from ridgeline.predict.operators.gemm import constants, gemm_time, quantize_time
from ridgeline.spec.device import DTYPE_BYTES, Device, Rate
from ridgeline.spec.lowbit import GEMM_ROWS, kv_bytes


class Timed(NamedTuple):
    """Seconds of one call, what bounds it (compute, memory, launch, link), and where the rate came from."""

    seconds: float
    bound: str
    source: str
    spread: float = 0.1
    """Relative 68 % error of such estimates."""


_CPU_SHARE = {"gemm": 0.70, "bmm": 0.40, "attention": 0.35}
"""Fraction of a CPU's peak that well-tuned kernels reach on large shapes: class defaults, which `probe` replaces."""
_CPU_MEMORY_SHARE = 0.70
_CPU_SPREAD = 0.35
_MEASURED_SPREAD = 0.08


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of ``dtype``; without dedicated units it runs at the rate of the next wider dtype."""
    return machine(device).peak(dtype)


def find_rate(device: Device, kind: str, direction: str, dtype: str) -> Rate | None:
    """The measured rate of a kind of operator, most specific key first; None if it was not measured."""
    rates = device.rates
    if not rates:
        return None
    kind = "cast" if kind == "accumulate" else kind  # as many passes over memory per byte
    return rates.get(f"{kind}.{direction}.{dtype}") or rates.get(f"{kind}.{dtype}")


def op_time(op: Op, device: Device, calls: float = 1) -> Timed:
    """Seconds of ``op`` on ``device``, on a CPU in ``calls``; collectives and copies have their own modules."""
    if op.kernel == "packed" and "attention_pool" in device.rates:
        return _packed_attention(op, device)
    rate = _low_rate(op, device) or find_rate(device, op.kind, op.direction, op.dtype) if device.rates else None
    if rate is not None:
        compute = op.flops / rate.flop_rate if rate.flop_rate else 0.0
        memory = op.bytes / rate.byte_rate if rate.byte_rate else 0.0
        latency = op.pieces * (rate.latency + device.extra_latency)
        if device.kind == "cpu" and calls != 1:
            latency += (calls - 1) * (_call_latency(op, device) + device.extra_latency)
        return _bounded(latency, compute, memory, rate.source, _MEASURED_SPREAD)
    m = machine(device)
    if device.kind == "cpu":
        share = _CPU_SHARE.get(op.kind, 0.3)
        compute = op.flops / (m.peak(op.dtype) * share)
        memory = op.bytes / (m.bandwidth * _CPU_MEMORY_SHARE)
        latency = op.pieces * calls * device.launch_latency
        return _bounded(latency, compute, memory, "class default", _CPU_SPREAD)
    return _modeled(op, m)


def _call_latency(op: Op, device: Device) -> float:
    """Seconds that another operator of this kind costs a CPU however small it is."""
    rate = find_rate(device, op.kind, op.direction, op.dtype)
    return device.launch_latency if rate is None else rate.latency


def _low_rate(op: Op, device: Device) -> Rate | None:
    """The measured rate of a forward product with few rows, or with quantized weights.

    ``gemm_rowsM.D`` is the rate of M rows in bytes, mostly weights; between two values of M, the time per byte is
    interpolated. Above the largest M weights are dequantized first: ``gemm_many.D`` is the product with dequantized
    weights, ``expand.D`` the dequantization, in bytes of codes; the times of both add up.
    """
    if op.kind != "gemm" or op.direction != "forward" or len(op.shape) != 3:
        return None
    rows, out, inner = op.shape
    each, dtype = rows / max(1.0, op.experts), op.weight_dtype or op.dtype
    known = [(m, r) for m in GEMM_ROWS if (r := device.rates.get(f"gemm_rows{m}.{dtype}")) is not None]
    for (fewer, low), (more, high) in pairwise(known):
        if each <= more:
            part = max(0.0, (each - fewer) / (more - fewer))
            between = {"byte_rate": 1 / ((1 - part) / low.byte_rate + part / high.byte_rate),
                       "latency": (1 - part) * low.latency + part * high.latency}  # fmt: skip
            return low.model_copy(update=between)
    many, expand = device.rates.get(f"gemm_many.{dtype}"), device.rates.get(f"expand.{dtype}")
    if many is None or expand is None:
        return None
    codes = op.experts * out * inner * DTYPE_BYTES[dtype] / expand.byte_rate
    return many.model_copy(update={"latency": many.latency + codes})


def _packed_attention(op: Op, device: Device) -> Timed:
    """Attention of sequences one by one over a pool: with one new token each it is bound by reading the cached keys and
    values; a chunk's product runs at the normal rate, and if the pool is quantized, it is dequantized too."""
    batch, _, kv_heads, q_len, kv_len, dim = op.shape
    rate = device.rates.get(f"attention_pool.{op.kv_dtype}" if op.kv_dtype else "attention_pool")
    rate = rate or device.rates["attention_pool"]
    cached = (
        (1.0 if op.kernel == LATENT else 2.0)
        * kv_heads
        * kv_len
        * dim
        * (kv_bytes(op.kv_dtype, dim) if op.kv_dtype else DTYPE_BYTES[op.dtype])
    )
    seconds = rate.latency
    if q_len == 1 or op.kv_dtype:
        seconds += cached / rate.byte_rate
    if q_len > 1:
        chunk = find_rate(device, op.kind, op.direction, op.dtype)
        seconds += op.flops / batch / chunk.flop_rate if chunk else 0.0
    return Timed(batch * seconds, "memory" if q_len == 1 else "compute", rate.source, _MEASURED_SPREAD)


def _modeled(op: Op, m: Machine) -> Timed:
    more = (op.pieces - 1) * m.device.launch_latency
    if op.kind == "gemm" and len(op.shape) == 3:
        rows, n, k = op.shape
        k = max(1, k // 2) if op.sparse else k  # twice the dense rate
        t = gemm_time(m, op.dtype, rows, n, k, op.experts, op.bytes, DTYPE_BYTES.get(op.weight_dtype, 0), op.reuse)
        codes = codes_seconds(op, m) if op.kernel else 0.0
        return Timed(more + max(t.seconds, codes), t.bound if t.seconds >= codes else "compute", m.source,
                     m.spread("gemm"))  # fmt: skip
    if op.kind == "bmm" and len(op.shape) == 4:
        batch, rows, n, k = op.shape
        t = gemm_time(m, op.dtype, batch * rows, n, k, batch, op.bytes)
        return Timed(more + t.seconds, t.bound, m.source, m.spread("gemm"))
    if op.kind == "attention" and len(op.shape) == 6:
        backward = op.direction == "backward" and not op.recompute
        t = attention_time(m, op.kernel or "flash", op.shape, op.causal, op.dtype, op.kv_dtype, backward, op.reuse)
        kind = "decode" if op.shape[3] < op.shape[4] else "prefill"
        return Timed(t.seconds, t.bound, m.source, m.spread(kind))
    e = m.efficiency
    if op.kind == "quantize":  # bytes: the 16-bit tensor read once and its 8-bit copy written
        seconds = quantize_time(m, constants(m, "fp8"), op.bytes / 3.0)
        return Timed(seconds, "memory", m.source, m.spread("pointwise"))
    compute = op.flops / m.peak(op.dtype)
    near = m.resident(op.bytes)  # the previous kernel left it in the cache
    memory = op.bytes * (near / m.l2_bandwidth + (1.0 - near) / m.bandwidth) / e.pointwise_share
    return _bounded(op.pieces * m.slow * e.pointwise_latency, compute, memory, m.source, m.spread("pointwise"))


def _bounded(latency: float, compute: float, memory: float, source: str, spread: float) -> Timed:
    slow = max(compute, memory)
    bound = "launch" if latency > slow else "compute" if compute >= memory else "memory"
    return Timed(latency + slow, bound, source, spread)


def roof_seconds(op: Op, device: Device) -> float:
    """The least time allowed by the device's peak and bandwidth."""
    m = machine(device)
    moved = least_bytes(op) if op.kind == "attention" else op.bytes
    return max(op.flops / m.peak(op.dtype), moved / m.bandwidth)


def least_bytes(op: Op) -> float:
    """Memory traffic of attention; of a fused forward pass with keys and values read once for all query heads that
    share them."""
    if op.direction != "forward" or len(op.shape) != 6:
        return op.bytes
    batch, heads, kv_heads, q_len, kv_len, dim = op.shape
    width = DTYPE_BYTES[op.dtype]
    each = kv_bytes(op.kv_dtype, dim) if op.kv_dtype else width
    cached = (1.0 if op.kernel == LATENT else 2.0) * kv_heads * kv_len * dim * each
    return min(op.bytes or float("inf"), batch * (2.0 * heads * q_len * dim * width + cached))
