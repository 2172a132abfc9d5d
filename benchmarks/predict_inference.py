"""Predicted against measured inference: fixed batches and closed-loop serving, and how fast the predictor is.

    python benchmarks/predict_inference.py DATA_DIR [--json FILE]

DATA_DIR holds generation.csv, generation_engines.csv and serving.csv (the schemas of `ridgeline validate`). Errors of
serving are with what is inferred of the load generators, and in lines that end in "fields only" with the file alone.
Engines left out: the rows of an engine predicted with its mechanisms and another engine's seconds, as for an engine
that nobody has measured.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.predict.serving.engine_costs import ENGINES
from ridgeline.spec.errors import UserError
from ridgeline.validate import generation_rows as generation
from ridgeline.validate import serving_rows as serving
from ridgeline.validate.csv_table import BadCell, read_table


def judge(path, schema):
    """{(regime, quantity): signed errors} and the number of rows that could not be judged."""
    errors, skipped, seen = defaultdict(list), 0, set()
    for row in read_table(path):
        key = tuple(row.cells.get(c, "") for c in (*schema.REQUIRED, "backend", "precision", "pp", "ep"))
        if key in seen:  # repetitions of one configuration count once
            continue
        seen.add(key)
        try:
            found = schema.cases(row)
        except (UserError, BadCell):
            skipped += 1
            continue
        for case in found:
            alone = serving.ALONE if case.group.endswith(serving.ALONE) else ""
            model, device = row.text("model").split("/")[-1], row.text("device")
            engine = row.text("backend", generation.ENGINE)
            for regime in (f"{model} {device} {engine} tp{row.text('tp')}", f"all {engine}", "all"):
                errors[regime + alone, case.quantity].append(case.error)
    return errors, skipped


def table(title, errors, skipped):
    print(f"\n{title} ({skipped} rows skipped)")
    print(f"{'':58} {'quantity':8} {'n':>4} {'mean':>7} {'median':>7} {'bias':>7}")
    rows = []
    for (regime, quantity), values in sorted(errors.items()):
        size = [abs(v) for v in values]
        row = {
            "regime": regime,
            "quantity": quantity,
            "n": len(values),
            "mean_ape": statistics.fmean(size),
            "median_ape": statistics.median(size),
            "bias": statistics.median(values),
        }
        rows.append(row)
        print(
            f"{regime:58} {quantity:8} {row['n']:4} {row['mean_ape']:7.1%} {row['median_ape']:7.1%} {row['bias']:+7.1%}"
        )
    return rows


SECONDS = ("dispatch_s", "iteration_s", "schedule_s", "sequence_s", "layer_s", "prefill_share", "request_s")
"""Constants of an engine that were fitted; the others say what it does."""
OTHERS = {"vllm": "trtllm", "trtllm": "vllm"}


def left_out(path):
    """As :func:`judge`, with the seconds of each engine from the other one."""
    own = dict(ENGINES)
    for name, other in OTHERS.items():
        ENGINES[name] = replace(own[name], **{field: getattr(own[other], field) for field in SECONDS})
    try:
        return judge(path, serving)
    finally:
        ENGINES.update(own)


def clock(ask, repeats=5):
    """The least of a few processor times, after one warm-up."""
    ask()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        ask()
        times.append(time.process_time() - start)
    return min(times)


def speed():
    """Seconds of a few predictions."""
    gpt3 = experiments.make(
        "gpt3-175b",
        "4xa100-80g-sxm",
        {"kind": "generate", "batch_size": 8, "prompt_len": 2048 - 1000, "output_len": 1000},
        ["fp8", "tensor_parallel:degree=4"],
    )
    serve = {
        "kind": "serve",
        "rate": 10.0,
        "requests": 50_000,
        "prompt_len": 1024,
        "output_len": 256,
        "length_cv": 0.7,
        "engine": "vllm",
    }
    llama = experiments.make("llama3.1-70b", "8xh100-sxm", serve, ["fp8", "tensor_parallel:degree=8"])
    seconds = clock(lambda: predict(llama), repeats=1)
    return {"gpt3_1000_tokens_s": clock(lambda: predict(gpt3)), "requests_per_minute": 60 * 50_000 / seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {}
    for name, schema in (("generation", generation), ("generation_engines", generation), ("serving", serving)):
        path = args.data / f"{name}.csv"
        if not path.is_file():
            sys.exit(f"no {path.name} in {args.data}")
        report[name] = table(path.name, *judge(path, schema))
    report["serving, engines left out"] = table("serving.csv, engines left out", *left_out(args.data / "serving.csv"))
    report["speed"] = speed()
    print(f"\nGPT-3 175B on 4 A100, prefill and 1000 tokens: {report['speed']['gpt3_1000_tokens_s'] * 1e3:.1f} ms")
    print(f"simulated requests per minute: {report['speed']['requests_per_minute']:,.0f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
