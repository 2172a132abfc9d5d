"""Operators of a GPU timed one by one, as rows of the gemm and attention schemas: what ``probe`` calibrates with.

Kernels are replayed from a CUDA graph, so that the host's launches do not count; operands rotate through more memory
than the last-level cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = (1, 8, 32, 128, 512, 2048, 8192)
"""Rows (tokens) of the products."""
WEIGHTS = ((1024, 1024), (4096, 4096), (8192, 1024), (1024, 8192), (14336, 4096), (4096, 14336), (32000, 4096))
"""(n, k) of their weights: projections of small and large models, and a head."""
PREFILL = ((1, 512), (4, 512), (1, 2048), (4, 2048), (1, 8192))
"""(batch, length) of attention over a prompt."""
HEADS = ((32, 32, 128), (32, 8, 128), (16, 16, 64))
"""(heads, key/value heads, head size)."""
ROTATE_BYTES = 256 * 2**20
CALLS = 8
"""Kernels of one replayed graph."""

Row = dict[str, Any]


def operator_rows(device: torch.device, report: Callable[[str], None], quick: bool = False) -> Iterator[Row]:
    """Measure products and attention; yields rows of the schemas, device ``local``."""
    for m in ROWS[::2] if quick else ROWS:
        report(f"products of {m} rows")
        for n, k in WEIGHTS[::3] if quick else WEIGHTS:
            yield _product(device, m, n, k)
    report("attention")
    for heads, kv_heads, dim in HEADS[:1] if quick else HEADS:
        for batch, length in PREFILL[:2] if quick else PREFILL:
            yield _attention(device, batch, length, heads, kv_heads, dim)


def _product(device: torch.device, m: int, n: int, k: int) -> Row:
    copies = max(1, min(CALLS, ROTATE_BYTES // (2 * (m * k + n * k))))
    pairs = [
        (torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.randn(n, k, device=device, dtype=torch.bfloat16))
        for _ in range(copies)
    ]
    seconds = timed(device, [partial(F.linear, x, w) for x, w in pairs])
    return {"device": "local", "dtype": "bf16", "m": m, "n": n, "k": k, "seconds": seconds, "source": "probe"}


def _attention(device: torch.device, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Row:
    def random(h: int) -> Tensor:
        return torch.randn(batch, h, length, dim, device=device, dtype=torch.bfloat16)

    q, k, v = random(heads), random(kv_heads), random(kv_heads)
    grouped = kv_heads < heads

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return {
        "device": "local", "phase": "prefill", "dtype": "bf16", "kv_dtype": "bf16", "batch": batch, "q_len": length,
        "kv_len": length, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": dim, "causal": 1,
        "seconds": timed(device, [run]), "source": "probe",
    }  # fmt: skip


def timed(device: torch.device, calls: list[Callable[[], Tensor]], budget: float = 0.15) -> float:
    """Median seconds of one call; the calls take turns."""
    turns = [calls[i % len(calls)] for i in range(CALLS)]
    with torch.no_grad():
        for call in turns[:3]:
            call()
        replay = _graph(device, turns) if device.type == "cuda" else lambda: [call() for call in turns]
        replay()
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - start < budget and len(times) < 200):
            times.append(_once(device, replay))
    return statistics.median(times) / len(turns)


def _graph(device: torch.device, turns: list[Callable[[], Tensor]]) -> Callable[[], object]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in turns:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call()
    return graph.replay


def _once(device: torch.device, replay: Callable[[], object]) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    replay()
    return time.perf_counter() - start
