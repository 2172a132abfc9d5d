"""Serving predicted and measured on this machine: throughput and median latencies at several loads, over HTTP.

    python benchmarks/serve_predicted.py --json benchmarks/results/serve_predicted.json

Probes the machine first, since a prediction is as good as its profile; then asks the server for all that it gives
(clients that never rest), and for shares of that (Poisson arrivals). The same requests are simulated and sent. Needs
a machine that does nothing else: the load average is in the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from ridgeline import experiments
from ridgeline.measure.ablate import measure_plan
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.probing.probe import probe
from ridgeline.predict import predict
from ridgeline.spec.experiment import Experiment

PLAN = ["paged_kv", "continuous_batching", "chunked_prefill", "padding_free", "hierarchical_search", "flash_attention"]
METRICS = ("tokens_per_s", "requests_per_s", "ttft_p50_s", "tpot_p50_s", "e2e_p50_s", "batch_mean")
LIMITS = {"tokens_per_s": 0.15, "ttft_p50_s": 0.20, "tpot_p50_s": 0.20, "e2e_p50_s": 0.20}
"""What predicted over measured may be off by."""


def main() -> int:
    """Run the benchmark; exit code 1 when a prediction misses its limit."""
    args = _arguments()
    if not args.keep_profile:
        probe(1, progress=lambda stage: print(f"  probing: {stage}", file=sys.stderr))
    work = {"kind": "serve", "prompt_len": args.prompt_len, "output_len": args.output_len, "length_cv": args.length_cv,
            "requests": args.requests}  # fmt: skip
    full = compare(_experiment(args.model, {**work, "concurrency": args.clients}), f"{args.clients} clients", args)
    rows = [full]
    for share in args.loads:
        rate = round(share * full["requests_per_s"]["measured"], 3)
        rows.append(compare(_experiment(args.model, {**work, "rate": rate}), f"{share:.0%} of it, {rate:g}/s", args))
    missed = [f"{r['load']}: {m}" for r in rows for m, most in LIMITS.items() if abs(r[m]["ratio"] - 1) > most]
    report = {"model": args.model, "plan": PLAN, "workload": work, "limits": LIMITS, "loads": rows, "missed": missed,
              "environment": fingerprint()}  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("missed: " + (", ".join(missed) or "nothing"))
    return 1 if missed else 0


def compare(e: Experiment, load: str, args: argparse.Namespace) -> dict[str, Any]:
    """Predicted over measured, metric by metric; measured is the median of the repeats."""
    busy = load_average()
    predicted = predict(e)
    runs = [measure_plan(e, repeat=r) for r in range(args.repeats)]
    failed = next((r for r in runs if r.status != "ok"), None)
    if failed is not None:
        raise SystemExit(f"{load}: {failed.status}: {failed.reason}")
    out: dict[str, Any] = {"load": load, "load_average": busy}
    for name in METRICS:
        values = [r.metrics[name].value for r in runs]
        foretold = predicted.metrics[name].value
        out[name] = {"predicted": foretold, "measured": statistics.median(values), "runs": values,
                     "ratio": foretold / statistics.median(values)}  # fmt: skip
    late = [c for r in runs for c in r.checks if not c.passed]
    out["failed_checks"] = [c.name for c in late]
    said = "  ".join(f"{n} {out[n]['measured']:.4g} (predicted × {out[n]['ratio']:.2f})" for n in METRICS)
    print(f"{load}: {said}" + (f"  FAILED: {late[0].name}" if late else ""), flush=True)
    return out


def _experiment(model: str, work: dict[str, Any]) -> Experiment:
    return experiments.make(model, "local", work, PLAN)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-mini")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--length-cv", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--clients", type=int, default=32, help="of the load that takes all the server gives")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8], help="shares of that")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep-profile", action="store_true", help="do not probe again")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
