"""Fused layers against the plain model: time of forward and backward, operators run, and each kernel alone; one run.

Variants take turns in every round, so that a disturbance hits all of them; ratios are of medians over rounds, with the
smallest and largest ratio of any round beside them. On the CPU, in fp32, with the threads that torch has.

    python benchmarks/fused_layers.py [--rounds 5] [--out benchmarks/results/fused_layers.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.jobs.malloc import keep_freed_memory
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.kernels import functions, native
from ridgeline.nn.model import fused, fused_loss
from ridgeline.nn.model.attention import AttentionBackend, naive_attention
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.mlp import gated
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.kernels.fused_layers import chunk_rows

MODEL = ModelSpec(
    name="bench", family="llama", vocab_size=8000, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=32, intermediate_size=704, max_positions=256,
)  # fmt: skip
BATCH, LENGTH = 4, 256
VIEWS = ("view", "detach", "transpose", "as_strided", "split", "expand", "select", "slice", "permute", "alias", "t.def")
PARTS = ("projections", "elementwise", "loss")


class Count(TorchDispatchMode):
    """Operators that touch data, and calls of our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(v in str(func) for v in VIEWS):
            self.operators += 1
        return func(*args, **(kwargs or {}))


def variant(backend: str, *parts: str) -> Callable[[], None]:
    """One forward and backward of the model with some of the fusions."""
    model = build(MODEL, seed=0)
    model.set_attention(backend)
    if "projections" in parts:
        fused.merge_projections(model)
    if "elementwise" in parts:
        fused.fuse_elementwise(model)
        if backend == "naive":
            model.set_attention(AttentionBackend("naive", fused.fused_naive_attention, wants_bias=True))
    loss = partial(fused_loss.chunked_token_loss, rows=chunk_rows) if "loss" in parts else token_loss
    ids = torch.randint(MODEL.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)

    def step() -> None:
        model.zero_grad()
        total, count = loss(model(ids, return_hidden=True), model.head, labels)
        (total / count).backward()

    return step


def operators(step: Callable[[], None]) -> int:
    """Operators and kernels of one step."""
    calls = 0
    inner = functions.call

    def counted(*args):
        nonlocal calls
        calls += 1
        return inner(*args)

    functions.call = counted
    try:
        with Count() as count:
            step()
    finally:
        functions.call = inner
    return count.operators + calls


def kernels() -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """(plain, fused) forward and backward of each part alone, at the model's sizes."""
    rows, h, f = BATCH * LENGTH, MODEL.hidden_size, MODEL.intermediate_size
    x, u, gate, up = (torch.randn(rows, n, requires_grad=True) for n in (h, h, f, f))
    both = torch.randn(rows, 2 * f, requires_grad=True)
    norm = RMSNorm(h, 1e-6)
    g, wide, g_heads = torch.randn(rows, h), torch.randn(rows, f), torch.randn(BATCH, MODEL.num_heads, LENGTH, 32)
    heads, d = MODEL.num_heads, MODEL.head_dim
    q, k, v = (torch.randn(BATCH, n, LENGTH, d, requires_grad=True) for n in (heads, 4, 4))
    mask = Mask(torch.full((LENGTH, LENGTH), -1e30).triu(1), False)
    hidden, labels = torch.randn(rows, h, requires_grad=True), torch.randint(MODEL.vocab_size, (rows,))
    head = torch.nn.Linear(h, MODEL.vocab_size, bias=False)
    p = torch.nn.Parameter(torch.randn(2_000_000))
    p.grad = torch.randn_like(p)
    adamw = torch.optim.AdamW([p], fused=True)
    master, m, s, low = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p), p.detach().bfloat16()

    def plain_norm():
        total = x + u
        torch.autograd.backward((norm(total), total), (g, g))

    def fused_norm():
        total, y = fused.add_norm(x, u, norm)
        torch.autograd.backward((y, total), (g, g))

    def plain_update():
        adamw.step()
        low.copy_(p.detach())

    step = iter(range(1, 10**9))

    def update():
        functions.adamw_(low, master, p.grad, m, s, 1e-3, 0.9, 0.999, 1e-8, 0.01, next(step))

    return {
        "residual + norm": (plain_norm, fused_norm),
        "SwiGLU": (lambda: gated("silu", gate, up).backward(wide),
                   lambda: functions.bias_activation(both, None, "silu").backward(wide)),
        "scores, mask, softmax, values": (lambda: naive_attention(q, k, v, mask).backward(g_heads),
                                          lambda: fused.fused_naive_attention(q, k, v, mask).backward(g_heads)),
        "head + loss": (lambda: token_loss(hidden, head, labels)[0].backward(),
                        lambda: functions.linear_loss(hidden, head.weight, None, labels,
                                                      chunk_rows(rows, MODEL.vocab_size, h), torch.float32).backward()),
        "loss on logits": (lambda: F.cross_entropy(head(hidden), labels).backward(),
                           lambda: functions.logits_loss(head(hidden), labels).backward()),
        "AdamW and the copy to bf16": (plain_update, update),
    }  # fmt: skip


def timed(steps: dict[str, Callable[[], None]], rounds: int, again: int = 1) -> dict[str, list[float]]:
    """Seconds of each step in every round, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for r in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(again):
                step()
            if r:
                times[name].append((time.perf_counter() - start) / again)
    return times


def ratio(base: list[float], other: list[float]) -> dict[str, float]:
    """How many times faster ``other`` is: of medians, and the extremes over rounds."""
    each = [a / b for a, b in zip(base, other, strict=True)]
    return {"speedup": statistics.median(base) / statistics.median(other), "lowest": min(each), "highest": max(each)}


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--out", default="benchmarks/results/fused_layers.json")
    given = args.parse_args()
    keep_freed_memory()  # as the training engine does
    if native.library() is None:
        raise SystemExit("no C++ compiler: there is nothing to measure")
    result: dict = {"environment": {**fingerprint(), "threads": torch.get_num_threads()}, "rounds": given.rounds,
                    "model": MODEL.name, "tokens": BATCH * LENGTH, "variants": {}, "kernels": {}}  # fmt: skip
    for backend in ("naive", "flash"):
        steps = {"off": variant(backend), **{p: variant(backend, p) for p in PARTS}, "all": variant(backend, *PARTS)}
        times = timed(steps, given.rounds)
        for name, step in steps.items():
            row = {"seconds": statistics.median(times[name]), "operators": operators(step)}
            result["variants"][f"{backend}, {name}"] = row | ratio(times["off"], times[name])
    for name, (plain, ours) in kernels().items():
        times = timed({"plain": plain, "fused": ours}, given.rounds, again=3)
        row = {"plain_s": statistics.median(times["plain"]), "fused_s": statistics.median(times["fused"])}
        result["kernels"][name] = row | ratio(times["plain"], times["fused"])
    for group in ("variants", "kernels"):
        for name, row in result[group].items():
            count = f"  {row['operators']:5d} operators" if "operators" in row else ""
            print(f"{name:32} {row['speedup']:.2f}x [{row['lowest']:.2f}, {row['highest']:.2f}]{count}")
    Path(given.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
