"""A sample of this machine's own: its profile by ``ridgeline probe``, and training steps measured after it.

    RIDGELINE_HOME=$(mktemp -d) python benchmarks/probed_sample.py --json tests/data/probed.json

The test suite predicts the rows from the profile and holds the predictor to the error that the README claims for a
probed machine (``tests/validate/test_probed_sample.py``), so the file must come from a machine that does nothing else:
nothing is written when the load average is above ``--busy`` before or between the measurements. Every row is the median
over rounds in alternating order, each in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline import experiments
from ridgeline.measure.ablate import measure_plan, order
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.merge import merge
from ridgeline.measure.probing.probe import probe
from ridgeline.predict import predict

MODEL = "llama-mini"
WORKLOAD = {"kind": "pretrain", "seq_len": 256, "batch_size": 4, "steps": 10}
PLANS: dict[str, tuple[int, list[str]]] = {
    "baseline": (1, []),
    "mixed_precision": (1, ["mixed_precision:dtype=bf16"]),
    "flash_attention": (1, ["flash_attention"]),
    "recompute": (1, ["recompute:policy=full"]),
    "lora": (1, ["lora:rank=8,alpha=128"]),
    "int8_lora": (1, ["lora:rank=8,alpha=128", "rtn:bits=8"]),
    "zero2": (2, ["zero:stage=2"]),
    "zero3_recompute": (2, ["zero:stage=3", "recompute:policy=full"]),
}
"""(processes, techniques)."""
OWN = 2.0
"""Load that the measurements themselves may make."""


def main() -> int:
    """Probe, measure and write; exit code 1 when the machine is not quiet."""
    args = _arguments()
    if not _quiet(args):
        return 1
    device, _ = probe(2, progress=lambda stage: print(f"  probing: {stage}", file=sys.stderr))
    made = {name: experiments.make(MODEL, f"{n}xlocal", WORKLOAD, plan) for name, (n, plan) in PLANS.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for cell in order(list(made), args.rounds):
        busy = load_average()
        result = measure_plan(made[cell.plan], repeat=cell.repeat, memory=cell.repeat == 0)
        if result.status != "ok":
            raise SystemExit(f"{cell.plan}: {result.status}: {result.reason}")
        runs[cell.plan].append({"tokens_per_s": merge([result]).metrics["tokens_per_s"].value, "load": busy or 0.0,
                                **({"peak_bytes": result.peak_bytes} if result.memory else {})})  # fmt: skip
        print(f"  {cell.plan}: {runs[cell.plan][-1]}", file=sys.stderr)
    rows = [_row(name, found) for name, found in runs.items()]
    for row in rows:
        said = predict(made[row["name"]]).metrics["tokens_per_s"].value
        print(f"{row['name']:18} {row['tokens_per_s']:8.0f} tokens/s, predicted {said / row['tokens_per_s'] - 1:+.1%}")
    busiest = max(row["load"] for row in rows)
    if busiest > args.busy + OWN:
        print(f"the load average rose to {busiest:g}: nothing is written; try again when nothing else runs")
        return 1
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {"commit": commit, "environment": fingerprint(), "model": MODEL, "workload": WORKLOAD,
              "device": device.model_dump(mode="json", exclude_defaults=True), "rows": rows}  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _row(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    ranks, plan = PLANS[name]
    speeds = [f["tokens_per_s"] for f in found]
    return {"name": name, "plan": plan, "ranks": ranks, "tokens_per_s": statistics.median(speeds), "rounds": speeds,
            "peak_bytes": next(f["peak_bytes"] for f in found if "peak_bytes" in f),
            "load": max(f["load"] for f in found)}  # fmt: skip


def _quiet(args: argparse.Namespace) -> bool:
    """Whether the load is low enough, after waiting for it."""
    until = time.monotonic() + 60 * args.wait
    while (busy := load_average() or 0.0) > args.busy:
        if time.monotonic() > until:
            print(f"the load average is {busy:g}: too busy to measure; try again when nothing else runs")
            return False
        time.sleep(20)
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=float, default=0.5, help="load average above which nothing is measured")
    parser.add_argument("--wait", type=float, default=0.0, help="minutes to wait for the load to fall")
    parser.add_argument("--json", type=Path, help="where to write the sample")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
