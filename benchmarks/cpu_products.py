"""Products of a CPU's one core with dense weights and weights in codes, by rows of inputs: ours beside PyTorch's.

Then what training in bf16 takes of a layer and of attention, forward and backward: PyTorch's in fp32, its in bf16, and
ours.

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
from ridgeline.nn.kernels.products import linear
from ridgeline.nn.kernels.widened import MANY_ROWS, fused_attention, matmul, wide_product
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


TOKENS, HEADS, HEAD = 512, 8, 64
"""Of trained layers: rows, and those of four sequences."""


def trained() -> dict[str, dict[str, Callable[[], object]]]:
    """By operator: a forward and a backward pass of each kind."""
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, w = (torch.randn(n, WIDTH, dtype=dtype, requires_grad=True) for n in (TOKENS, OUT))
        q, k, v = (torch.randn(4, HEADS, TOKENS, HEAD, dtype=dtype, requires_grad=True) for _ in range(3))
        of: dict[str, tuple[list, Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
            "linear": ([x, w], F.linear, linear),
            "attention, score matrices": ([q, k, v], partial(scores, torch.matmul), partial(scores, matmul)),
            "attention, fused": ([q, k, v], partial(F.scaled_dot_product_attention, is_causal=True),
                                 lambda q, k, v: fused_attention(q, k, v, None, True, False)),
        }  # fmt: skip
        for operator, (given, theirs, mine) in of.items():
            d = torch.randn_like(theirs(*given))
            for name, call in ((kind, theirs), (f"{kind}, ours", mine)):
                if kind == "bf16" or call is theirs:
                    calls.setdefault(operator, {})[name] = partial(pass_both_ways, call, given, d)
    return calls


def scores(product: Callable[..., torch.Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return product(product(q, k.mT).softmax(-1), v)


def pass_both_ways(call: Callable[..., torch.Tensor], given: list[Tensor], d: Tensor) -> None:
    torch.autograd.grad(call(*given), given, d)


def in_turn(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def quickest(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the quickest of each, which take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


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
            best = quickest({name: partial(in_turn, each) for name, each in calls.items()}, given.rounds)
            done = rows * OUT * WIDTH * WEIGHTS / 1e9
            result["rows"][str(rows)] = {
                name: {"products_per_s": 1e9 * done / s, "over_fp32": best["fp32"] / s} for name, s in best.items()
            }
            print(
                f"{rows:4} rows  " + "  ".join(f"{n} {done / s:.1f} ({best['fp32'] / s:.2f}x)" for n, s in best.items())
            )
    result["trained"] = {}
    for operator, kinds in trained().items():
        best = quickest(kinds, given.rounds)
        result["trained"][operator] = {name: {"seconds": t, "over_fp32": t / best["fp32"]} for name, t in best.items()}
        print(operator, {name: round(t / best["fp32"], 2) for name, t in best.items()}, "of fp32's time")
    keep_run(Path(given.out), result)


if __name__ == "__main__":
    main()
