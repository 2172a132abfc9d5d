"""What solving several experts side by side saves QMoE, for narrow and for wide experts.

Each shape is one layer of a mixture with random weights and random correlated inputs: 16 experts at once (or all that
there are) and one by one in turn, ABBA, in one process. Reported: medians of the seconds of a layer, their ratio, the
median and the range of the rounds' ratios, the share of the weights that came out otherwise, and how many experts of
this shape `qmoe` takes at once by itself.

    python benchmarks/qmoe_batching.py [--rounds 6] [--json benchmarks/results/qmoe_batching.json]
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
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.quant.packed import Stored
from ridgeline.runtime.compress_build import CompressBuild, LinearLayer, Site, Together
from ridgeline.runtime.solve.statistics import Gram
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.quantization.qmoe import QMoE

SHAPES = {"narrow": (64, 256, 128), "middling": (16, 512, 512), "wide": (4, 1024, 2048)}
"""Experts, hidden size, width of one expert."""


def problems(experts: int, hidden: int, inner: int) -> dict[str, list[tuple[list[torch.Tensor], torch.Tensor]]]:
    """Of each kind of site, every expert's weights and second moments."""
    draw = torch.Generator().manual_seed(0)

    def moments(width: int) -> torch.Tensor:
        mix = torch.randn(width, width, generator=draw) / width**0.5 + torch.eye(width)
        gram = Gram(width)
        gram.add(torch.randn(2 * width, width, generator=draw) @ mix)
        return gram.value

    def weight(out: int, width: int) -> torch.Tensor:
        return torch.randn(out, width, generator=draw) * 0.02

    return {
        "up": [([weight(inner, hidden), weight(inner, hidden)], moments(hidden)) for _ in range(experts)],
        "down": [([weight(hidden, inner)], moments(inner)) for _ in range(experts)],
    }


def solve(run: CompressBuild, step: Together, size: int, layer: Any) -> tuple[float, list[Stored]]:
    """(seconds of the step on all sites of the layer, ``size`` experts at a time; what is stored)."""
    found, seconds = [], 0.0
    for kind, experts in layer.items():
        sites = [Site(f"layers.0.mlp.experts.{e}.{kind}",
                      [LinearLayer(str(i), w, w) for i, w in enumerate(weights)], gram,
                      2 * len(gram), None) for e, (weights, gram) in enumerate(experts)]  # fmt: skip
        start = time.perf_counter()
        for at in range(0, len(sites), size):
            step.together(sites[at : at + size])
        seconds += time.perf_counter() - start
        found += [layer.stored for site in sites for layer in site.layers]
    return seconds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rows = {}
    for name in a.shapes.split(","):
        count, hidden, inner = SHAPES[name]
        spec = ModelSpec(name=name, family="mixtral", vocab_size=256, hidden_size=hidden, num_layers=1, num_heads=4,
                         num_kv_heads=4, head_dim=hidden // 4, intermediate_size=inner, num_experts=count,
                         experts_per_token=2, max_positions=64)  # fmt: skip
        e = experiments.make("mixtral-8x7b", "a100", {"kind": "compress"}, ["qmoe"])
        run = CompressBuild(e, spec, torch.device("cpu"))
        QMoE().compress(run)
        (step,) = run.at_site
        assert isinstance(step, Together)
        size = min(count, step.experts)
        layer = problems(count, hidden, inner)
        times: dict[str, list[float]] = {}
        stored: dict[str, list[Stored]] = {}
        for i in range(-1, a.rounds):  # the first warms up
            for each in ("batched", "alone") if i % 2 else ("alone", "batched"):
                seconds, found = solve(run, step, size if each == "batched" else 1, layer)
                times.setdefault(each, [])
                stored[each] = found
                if i >= 0:
                    times[each].append(seconds)
        ratios = [b / o for b, o in zip(times["batched"], times["alone"], strict=True)]
        other = sum(
            int((x.dense() != y.dense()).sum()) for x, y in zip(stored["batched"], stored["alone"], strict=True)
        )
        median = {each: statistics.median(t) for each, t in times.items()}
        rows[name] = {
            "experts": count, "hidden": hidden, "inner": inner, "batch": size,
            "default_batch": max(1, step.at_once(3 * hidden * inner + hidden**2 + inner**2)), "median_s": median,
            "ratio": median["batched"] / median["alone"], "ratio_median": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)], "different": other / (3 * count * hidden * inner),
        }  # fmt: skip
        print(f"{name:9s} {count} x ({hidden}, {inner}), {size} at once (of themselves {rows[name]['default_batch']}): "
              f"{median['batched']:.3f} s, one by one {median['alone']:.3f} s, ratio {rows[name]['ratio']:.2f} "
              f"[{min(ratios):.2f}, {max(ratios):.2f}]", flush=True)  # fmt: skip
    if a.json:
        result = {"rounds": a.rounds, "threads": torch.get_num_threads(), "shapes": rows, "environment": fingerprint()}
        a.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
