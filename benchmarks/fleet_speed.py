"""Seconds to simulate 24 hours of a recorded trace at 100 000 requests, on one core.

    python benchmarks/fleet_speed.py --trace AzureLLMInferenceTrace_conv.csv --json benchmarks/results/fleet_speed.json

The trace is repeated until the day is full, and as many of its requests as are wanted are kept, drawn at random.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ridgeline import fleets
from ridgeline.measure.environment import fingerprint
from ridgeline.predict.fleet.predict_fleet import predict_fleet
from ridgeline.predict.serving.arrivals import Arrival, read_trace
from ridgeline.spec.fleet import FleetSpec

DAY = 86400.0
LIMIT_S = 60.0
TOKENS = 4096
"""Longest request of the model: longer ones are left out before counting."""


def main() -> int:
    """Run the benchmark; exit code 1 when a fleet takes longer than the limit."""
    args = _arguments()
    hour = [r for r in read_trace(args.trace) if r.prompt + r.output <= TOKENS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "day.jsonl"
        file.write_text("".join(_line(r) for r in day(hour, args.requests)), encoding="utf-8")
        for name, pools in FLEETS.items():
            spec = FleetSpec.model_validate({"fleet": {"policy": "shortest-queue"}, "pools": pools})
            began = time.process_time()
            result = predict_fleet(spec, fleets.replicas_of(spec, args.model, {"trace": str(file), "engine": "vllm"}))
            spent = time.process_time() - began
            rows.append({"fleet": name, "label": spec.label, "requests": args.requests, "cpu_s": spent,
                         "requests_per_s": result.metrics["requests_per_s"].value})  # fmt: skip
            print(f"{name}: {spent:.1f} s for {args.requests} requests", flush=True)
    report: dict[str, Any] = {"limit_s": LIMIT_S, "rows": rows, "environment": fingerprint()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(r["cpu_s"] > LIMIT_S for r in rows))


def day(hour: list[Arrival], count: int, seed: int = 0) -> list[Arrival]:
    """``count`` requests in 24 hours, like those of ``hour``."""
    period = hour[-1].arrival + hour[-1].arrival / len(hour)
    times = int(DAY / period) + 1
    all_day = [r._replace(arrival=r.arrival + i * period) for i in range(times) for r in hour]
    all_day = [r for r in all_day if r.arrival < DAY]
    return sorted(random.Random(seed).sample(all_day, count))


def _line(r: Arrival) -> str:
    return json.dumps({"timestamp": r.arrival * 1e3, "input_length": r.prompt, "output_length": r.output}) + "\n"


FLEETS: dict[str, list[dict[str, Any]]] = {
    "one pool of 2": [{"name": "all", "on": "8xa100-80g-sxm", "replicas": 2}],
    "2 for prompts, 2 for tokens": [
        {"name": "prompt", "role": "prefill", "on": "8xh100-sxm", "replicas": 2},
        {"name": "token", "role": "decode", "on": "8xa100-80g-sxm", "replicas": 2},
    ],
    "one pool of 40": [{"name": "all", "on": "8xa100-80g-sxm", "replicas": 40}],
    "autoscaled, interrupted": [
        {"name": "all", "on": "8xa100-80g-sxm", "replicas": 2, "autoscale": {"target": 8.0, "max": 16},
         "spot": {"interruptions_per_hour": 0.2}},
    ],
}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="llama2-70b")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
