"""NLP-Fast's partitioning of a prefill on this CPU: time and peak memory, whole and in pieces.

    python benchmarks/partitioning.py [--rounds 5] [--json benchmarks/results/partitioning.json]

A model of two wide layers prefills prompts of 2048 to 8192 tokens: plain operators, `feed_forward_splitting`,
`partial_head_update`, both, PyTorch's fused attention, and that with both. Ratios are to the plain operators of the
same round (with fused attention: to fused attention alone); predictions need ``ridgeline probe``. Then a sweep of the
pieces' sizes at 2048 tokens, with the sizes that are chosen from the measured cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline import experiments
from ridgeline.measure.cells.generation_cell import build_generation
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.cache_size import cache_bytes, copy_rates
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.model.generate import make_cache, prefill
from ridgeline.predict import predict
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import make, resolve

MODEL = ModelSpec(name="wide", family="llama", vocab_size=512, hidden_size=1024, num_layers=2, num_heads=16,
                  num_kv_heads=16, head_dim=64, intermediate_size=4096, max_positions=8193, gated=False,
                  activation="gelu")  # fmt: skip
FFN, HEADS, FUSED = "feed_forward_splitting", "partial_head_update", "flash_attention"
PLANS: dict[str, tuple[str, ...]] = {
    "plain": (), "feed-forward split": (FFN,), "heads": (HEADS,), "both": (FFN, HEADS),
    "fused": (FUSED,), "fused, both": (FUSED, FFN, HEADS),
}  # fmt: skip
BASE = {"feed-forward split": "plain", "heads": "plain", "both": "plain", "fused": "plain", "fused, both": "fused"}
LENGTHS = (2048, 4096, 8192)
SWEEP = 2048


def experiment(plan: tuple[str, ...], length: int) -> Experiment:
    """The prefill of one prompt."""
    w = {"kind": "generate", "prompt_len": length, "output_len": 1, "batch_size": 1, "dtype": "fp32"}
    e = experiments.make("llama-tiny", "local", {"kind": "generate"}, [])
    workload, plan_ = type(e.workload).model_validate(w), Plan.parse(list(plan))
    return e.model_copy(update={"model": MODEL, "workload": workload, "plan": plan_})


class Case:
    """A model with a plan, and its times and peaks."""

    def __init__(self, plan: tuple[str, ...], length: int) -> None:
        self.e, techniques = resolve(experiment(plan, length))
        self.model = build_generation(self.e, torch.device("cpu"), techniques).model
        self.ids = torch.randint(MODEL.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        self.seconds: list[float] = []

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Prefill twice, and time the second: the first pays for pages of memory that the plan before gave back."""
        for _ in range(2):
            cache = make_cache(self.model, 1, self.ids.shape[1])
            start = time.perf_counter()
            out = prefill(self.model, self.ids, cache)
            seconds = time.perf_counter() - start
        self.seconds.append(seconds)
        return out

    def peak(self) -> int:
        """Bytes beyond weights at the peak of a prefill."""
        meter = Meter(self.model)
        meter.register(self.model.parameters(), "parameters")
        with meter:
            self.run()
        self.seconds.pop()
        return int(meter.peak.total - meter.peak.categories["parameters"])


def compare(length: int, rounds: int) -> list[dict[str, Any]]:
    """All plans at one length."""
    cases = {name: Case(plan, length) for name, plan in PLANS.items()}
    logits = {name: case.run() for name, case in cases.items()}
    for case in cases.values():
        case.seconds.clear()
    for _ in range(rounds):
        for case in cases.values():
            case.run()
    rows = []
    for name, case in cases.items():
        found = predict(case.e)
        weights = next(m.bytes for m in found.memory if m.category == "parameters")
        row = {
            "tokens": length, "plan": name, "seconds": statistics.median(case.seconds), "peak_bytes": case.peak(),
            "predicted_seconds": found.metrics["ttft_s"].value,
            "predicted_peak_bytes": found.metrics["peak_bytes"].value - weights,
            "largest_logit_difference": float((logits[name] - logits["plain"]).abs().max()),
        }  # fmt: skip
        if name in BASE:
            base = cases[BASE[name]].seconds
            ratios = sorted(b / a for a, b in zip(case.seconds, base, strict=True))
            row["speedup"] = {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]}
            row["predicted_speedup"] = predict(cases[BASE[name]].e).metrics["ttft_s"].value / row["predicted_seconds"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def sweep(rounds: int) -> list[dict[str, Any]]:
    """Sizes of pieces against whole layers."""
    inner = MODEL.intermediate_size
    settings = [f"{FFN}:rows={r},columns={c}" for r in (128, 512, SWEEP) for c in (256, 1024, inner)]
    settings += [f"{HEADS}:rows={r},keys={k}" for r in (64, 256, SWEEP) for k in (128, 512, SWEEP)]
    cases = {"": Case((), SWEEP)} | {s: Case((s,), SWEEP) for s in [*settings, FFN, HEADS]}
    for case in cases.values():
        case.run()
        case.seconds.clear()
    for _ in range(rounds):
        for case in cases.values():
            case.run()
    rows = []
    for name, case in cases.items():
        if name:
            ratios = [b / a for a, b in zip(case.seconds, cases[""].seconds, strict=True)]
            rows.append({"plan": name, "speedup": statistics.median(ratios), "peak_bytes": case.peak()})
    for name, sizes in ((FFN, (SWEEP,)), (HEADS, (1, SWEEP, SWEEP))):
        (t,) = [make(c) for c in cases[name].e.plan.calls]
        row = next(r for r in rows if r["plan"] == name)
        row["piece"] = t.piece(cases[name].e, *sizes)  # type: ignore[attr-defined]
    return rows


def main() -> None:
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    found: dict[str, Any] = {
        "environment": {**fingerprint(), "threads": torch.get_num_threads()},
        "model": MODEL.model_dump(exclude_defaults=True),
        "cache_bytes": cache_bytes(),
        "copy_bytes_per_s": copy_rates(),
        "sweep": sweep(a.rounds),
        "lengths": [],
    }
    for length in LENGTHS:
        found["lengths"] += compare(length, a.rounds)
        if a.json:
            a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
