"""Products of a CPU's one core with dense weights and weights in codes, by rows of inputs: ours beside PyTorch's.

Billions of multiply-adds per second of processor time, of several weights that do not fit a cache; kinds take turns in
every round, and the quickest round counts, as other work on the machine only adds. Ratios are to PyTorch's fp32. The
file keeps a run for each CPU and instruction set (see ``decode_speed.py``).

    python benchmarks/cpu_products.py [--rows 1 8 64 512] [--rounds 12] [--out benchmarks/results/cpu_products.json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from decode_speed import instructions, keep_run
from torch import Tensor

from ridgeline.measure.environment import fingerprint
from ridgeline.nn.kernels import native
from ridgeline.nn.kernels.widened import MANY_ROWS, wide_product
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear

OUT, WIDTH, WEIGHTS = 2816, 1024, 8
BITS = {"int8": (8, WIDTH), "int8, groups of 128": (8, 128), "int4, groups of 128": (4, 128)}
DENSE_ROWS = 32
"""Rows up to which our dense products are measured: they are made for few."""


def packed(bits: int, group: int) -> PackedLinear:
    codes = torch.randint(1 << bits, (OUT, WIDTH), dtype=torch.int32).to(torch.uint8)
    return PackedLinear(Packed(codes, torch.rand(OUT, WIDTH // group).half(), None, bits, group))


def ours(weight: Tensor, x: Tensor, y: Tensor) -> None:
    kind = native.TYPES[weight.dtype]
    native.dense_linear(native.Linear(0, weight.data_ptr(), None, None, None, kind, OUT, WIDTH, WIDTH), x, y)


def products(rows: int, weights: dict[str, list]) -> dict[str, list[Callable[[], object]]]:
    """Of each kind, a call for each weight."""
    x, y = torch.randn(rows, WIDTH), torch.empty(rows, OUT)
    calls: dict[str, list[Callable[[], object]]] = {}
    for name, held in weights.items():
        if name in BITS:
            calls[name] = [partial(layer, x) for layer in held]
            continue
        calls[name] = [partial(F.linear, x.to(w.dtype), w) for w in held]
        if name == "fp32":  # as in products.py; PyTorch takes oneDNN for bf16 itself
            calls["fp32, oneDNN"] = [partial(torch.ops.mkldnn._linear_pointwise, x, w, None, "none", [], "")
                                     for w in held]  # fmt: skip
        if name == "bf16" and rows >= MANY_ROWS:
            calls["bf16, multiplied in fp32"] = [partial(wide_product, x.to(w.dtype), w) for w in held]
        if rows <= DENSE_ROWS:
            calls[f"{name}, ours"] = [partial(ours, w, x, y) for w in held]
    return calls


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    args.add_argument("--rounds", type=int, default=12)
    args.add_argument("--out", default="benchmarks/results/cpu_products.json")
    given = args.parse_args()
    torch.set_num_threads(1)
    weights: dict[str, list] = {
        "fp32": [torch.randn(OUT, WIDTH) for _ in range(WEIGHTS)],
        "bf16": [torch.randn(OUT, WIDTH).bfloat16() for _ in range(WEIGHTS)],
        **{name: [packed(*b) for _ in range(WEIGHTS)] for name, b in BITS.items()},
    }
    result: dict = {"environment": {**fingerprint(), "threads": 1}, "instructions": instructions(),
                    "rounds": given.rounds, "weight": [OUT, WIDTH], "rows": {}}  # fmt: skip
    with torch.inference_mode():
        for rows in given.rows:
            calls = products(rows, weights)
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(given.rounds):
                for name, each in calls.items():
                    start = time.process_time()
                    for call in each:
                        call()
                    best[name] = min(best[name], time.process_time() - start)
            done = rows * OUT * WIDTH * WEIGHTS / 1e9
            result["rows"][str(rows)] = {
                name: {"products_per_s": 1e9 * done / s, "over_fp32": best["fp32"] / s} for name, s in best.items()
            }
            print(
                f"{rows:4} rows  " + "  ".join(f"{n} {done / s:.1f} ({best['fp32'] / s:.2f}x)" for n, s in best.items())
            )
    keep_run(Path(given.out), result)


if __name__ == "__main__":
    main()
