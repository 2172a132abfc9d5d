"""How long a sweep over chip designs takes, as JSON; and the sweep that docs/hardware.md shows.

    python benchmarks/hardware_sweep.py [--out FILE] [--repeats 5] [--workers 2] [--docs]

Sweeps ``examples/gpt3-chip.toml`` at two clocks and within the reticle only, so that over 1000 designs are predicted
(GPT-3 175B, eight chips of each), in fresh caches: area, power, cost, predictions and the front. ``--docs`` also writes
the tables and the picture of the page, which are those of the example.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

from ridgeline import experiments
from ridgeline.catalog import chips
from ridgeline.predict.operators.gemm import gemm_time
from ridgeline.report.table import markdown
from ridgeline.search.design_space import read_space
from ridgeline.search.design_tables import sweep_svg, sweep_tables
from ridgeline.search.designs import Sweep, sweep

ROOT = Path(__file__).parents[1]
WORKLOAD = {"kind": "generate", "batch_size": 16, "prompt_len": 1024, "output_len": 256}


def run(workers: int, many: bool = False) -> Sweep:
    """The example's sweep; with ``many``, of twice as many designs and without its limits."""
    space = read_space(ROOT / "examples" / "gpt3-chip.toml")
    if many:
        space = replace(space, vary={**space.vary, "clock": [1.2e9, 1.41e9]}, limits={})
    e = experiments.make("gpt3-175b", "8xa100-80g-sxm", WORKLOAD, ["tensor_parallel:degree=8"])
    return sweep(space, e, chips.prices("2023-10"), workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "hardware_sweep.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    seconds, predicted = [], 0
    for _ in range(args.repeats):
        gemm_time.cache_clear()
        start = time.perf_counter()
        found = run(args.workers, many=True)
        seconds.append(time.perf_counter() - start)
        predicted = sum(bool(d.metrics) for d in found.designs)
    result = {
        "designs": len(found.designs), "predicted": predicted, "front": len(found.front), "workers": args.workers,
        "seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    if args.docs:
        write_docs(run(args.workers))


def write_docs(found: Sweep) -> None:
    """The tables between the page's markers, and its picture."""
    page = ROOT / "docs" / "hardware.md"
    text = page.read_text(encoding="utf-8")
    for name, table in zip(("sweep", "verdicts"), sweep_tables(found), strict=True):
        inside = f"<!-- {name} -->\n\n{markdown([table]).strip()}\n\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, new=inside: new, text, flags=re.S)
    page.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "hardware-sweep.svg").write_text(sweep_svg(found), encoding="utf-8")


if __name__ == "__main__":
    main()
