"""What autoscaling and interruptible machines give a fleet: a day whose load rises and falls, simulated.

    python benchmarks/fleet_elasticity.py --trace AzureLLMInferenceTrace_conv.csv \\
        --json benchmarks/results/fleet_elasticity.json

The requests are those of a recorded hour, repeated, of which as many are drawn at each time of the day as a sine
between ``--night`` and 1 of the highest rate says. Every fleet serves the same requests; the fixed one has the fewest
replicas that keep ``--ttft`` and ``--tpot`` at the 99th percentile. Interruptible machines cost ``--spot-price`` of
others (an assumption, as the discounts of clouds are).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from ridgeline import fleets
from ridgeline.measure.environment import commit, fingerprint
from ridgeline.predict.fleet.predict_fleet import predict_fleet
from ridgeline.predict.serving.arrivals import Arrival, read_trace
from ridgeline.spec.fleet import FleetSpec
from ridgeline.spec.result import Result

DAY = 86400.0
TOKENS = 4096
"""Longest request of the model: longer ones are left out before counting."""
MACHINE = "a100-80g-sxm"
METRICS = ("ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "all_replicas", "all_busy_share", "dollars_per_hour",
           "recomputed_requests")  # fmt: skip


def main() -> int:
    """Run the benchmark; exit code 1 when no fixed fleet keeps the limits."""
    args = _arguments()
    hour = [r for r in read_trace(args.trace) if r.prompt + r.output <= TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "day.jsonl"
        file.write_text(
            "".join(_line(r) for r in rising_and_falling(hour, args.requests, args.night)), encoding="utf-8"
        )
        fixed, found = _smallest(args, file)
        if found is None:
            print(f"{args.most} replicas do not keep the limits")
            return 1
        price = found.metrics["dollars_per_hour"].value / fixed
        spot = {"price_per_hour": price * args.spot_price,
                "spot": {"interruptions_per_hour": args.interruptions, "notice_s": 30}}  # fmt: skip
        scale = {"autoscale": {"target": args.target, "max": 2 * fixed}}
        rows = {f"{fixed} replicas": found}
        for name, extra in {f"autoscaled to {args.target:g} requests each": scale, f"{fixed} interruptible": spot,
                            "autoscaled, interruptible": scale | spot}.items():  # fmt: skip
            rows[name] = _predict(args, file, {"replicas": fixed, **extra})
    said = {k: v for k, v in vars(args).items() if k not in ("json", "trace")}
    report: dict[str, Any] = {"arguments": said, "machine": MACHINE, "rows": {}}
    report |= {"commit": commit(), "environment": fingerprint()}
    for name, result in rows.items():
        report["rows"][name] = row = {m: result.metrics[m].value for m in METRICS if m in result.metrics}
        print(f"{name}: " + "  ".join(f"{m} {v:.4g}" for m, v in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _smallest(args: argparse.Namespace, file: Path) -> tuple[int, Result | None]:
    """The fewest fixed replicas within the limits."""
    for n in range(1, args.most + 1):
        result = _predict(args, file, {"replicas": n})
        found = {m: result.metrics[m].value for m in ("ttft_p99_s", "tpot_p99_s")}
        if found["ttft_p99_s"] <= args.ttft and found["tpot_p99_s"] <= args.tpot:
            return n, result
    return args.most, None


def _predict(args: argparse.Namespace, file: Path, pool: dict[str, Any]) -> Result:
    spec = FleetSpec.model_validate({"fleet": {"policy": "shortest-queue"},
                                     "pools": [{"name": "all", "on": MACHINE, **pool}]})  # fmt: skip
    return predict_fleet(spec, fleets.replicas_of(spec, args.model, {"trace": str(file), "engine": "vllm"}))


def rising_and_falling(hour: list[Arrival], count: int, night: float, seed: int = 0) -> list[Arrival]:
    """``count`` requests in 24 hours, like those of ``hour``, at rates from ``night`` (at 0:00) to 1 of the highest."""
    draw = random.Random(seed)
    period = hour[-1].arrival + hour[-1].arrival / len(hour)
    copies = math.ceil(DAY / period) * math.ceil(2 * count / (len(hour) * DAY / period * (1 + night)))
    everything = [r._replace(arrival=r.arrival + i * period) for i in range(copies) for r in hour]
    everything = [r._replace(arrival=r.arrival % DAY) for r in everything]

    def level(t: float) -> float:
        return night + (1 - night) * (1 - math.cos(2 * math.pi * t / DAY)) / 2

    kept = [r for r in everything if draw.random() < level(r.arrival)]
    return sorted(draw.sample(kept, min(count, len(kept))))


def _line(r: Arrival) -> str:
    return json.dumps({"timestamp": r.arrival * 1e3, "input_length": r.prompt, "output_length": r.output}) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="llama2-13b")
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--night", type=float, default=0.2, help="lowest over highest rate")
    parser.add_argument("--ttft", type=float, default=2.0, help="limit of the 99th percentile, seconds")
    parser.add_argument("--tpot", type=float, default=0.1, help="limit of the 99th percentile, seconds")
    parser.add_argument("--most", type=int, default=24, help="replicas to try")
    parser.add_argument("--target", type=float, default=16.0, help="requests per replica that autoscaling aims at")
    parser.add_argument("--spot-price", type=float, default=0.4, help="of an interruptible machine, of the price")
    parser.add_argument("--interruptions", type=float, default=0.2, help="of a machine, per hour")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
