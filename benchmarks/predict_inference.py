"""Predicted against measured inference: fixed batches and closed-loop serving, and how fast the predictor is.

    python benchmarks/predict_inference.py DATA_DIR [--json FILE]

DATA_DIR holds generation.csv, generation_engines.csv and serving.csv (the schemas of `ridgeline validate`). Errors of
serving are with what is inferred of the load generators, and in lines that end in "fields only" with the file alone.
Engines left out: the rows of an engine predicted with its mechanisms and another engine's seconds, as for an engine
that nobody has measured. Intervals: the share of rows inside the 95 % interval that their prediction states, its mean
width, and both with the constant behind it set without the judged engine. The constants of `predict/interval.py` are
fitted here: each is the least, in steps of 0.01, with which 95 % of its rows are inside, every engine counting as much
as any other; those of engines left out hold 95 % of every engine with 20 rows or more as well. Where the load is
inferred, the interval is without what an unknown load adds.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from ridgeline import experiments
from ridgeline.measure.environment import fingerprint
from ridgeline.predict import interval, predict
from ridgeline.predict.serving.engine_costs import ENGINES
from ridgeline.spec.errors import UserError
from ridgeline.validate import generation_rows as generation
from ridgeline.validate import serving_rows as serving
from ridgeline.validate.csv_table import BadCell, read_table


def judge(rows, schema):
    """{(regime, quantity): signed errors}, the number of rows that could not be judged, and (engine, case) of the
    others."""
    errors, skipped, seen, judged = defaultdict(list), 0, set(), []
    for row in rows:
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
            judged.append((engine, case))
    return errors, skipped, judged


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


def contained(rows):
    """Rows of vLLM of 2023 without their ``backend``, for which validate then takes the container that the source's
    scripts start."""
    return [
        replace(row, cells=row.cells | {"backend": ""})
        for row in rows
        if row.text("backend", "") == generation.ENGINE and row.text("source", "").startswith(generation.CONTAINED)
    ]


def left_out(rows):
    """As :func:`judge`, with the seconds of each engine from the other one."""
    own = dict(ENGINES)
    for name, other in OTHERS.items():
        others = {field: getattr(own[other], field) for field in SECONDS}
        ENGINES[name] = replace(own[name], fitted_on=(), **others)
    try:
        return judge(rows, serving)
    finally:
        ENGINES.update(own)


def task_of(case):
    return "serve" if "concurrency" in case.label else "generate"


def first_token(case):
    return case.quantity == "ttft_s"


def shipped():
    return {"FIRST": dict(interval.FIRST), "LOAD": interval.LOAD, "ENGINE": dict(interval.ENGINE)}


def spread(case, constants):
    """The 68 % error that a case would state with other constants, and with its load known where it is inferred: of
    what its prediction states, only these change."""
    known, first, task = case.known, first_token(case), task_of(case)
    rest = case.spread**2 - sum(x * x for x in interval.causes(task, first, known).values())
    own = 0.0 if known.validated else interval.UNVALIDATED
    if first:
        waiting = known.waiting if case.group.endswith(serving.ALONE) else 0.0
        own = math.hypot(own, constants["FIRST"][task], constants["LOAD"] * waiting)
    if not known.engine:
        own = math.hypot(own, constants["ENGINE"]["first" if first else "token"])
    return math.sqrt(rest + own * own)


def inside(cases, constants):
    """(share inside the interval, mean factor that it reaches either way)."""
    reach = [1.96 * spread(c, constants) for c in cases]
    held = [abs(math.log(c.predicted / c.measured)) <= r for c, r in zip(cases, reach, strict=True)]
    return statistics.fmean(held), math.exp(statistics.fmean(reach))


def changed(constants, name, value):
    """``constants`` with the one called ``name`` (``ENGINE first``) at ``value``."""
    outer, _, inner = name.partition(" ")
    return constants | {outer: constants[outer] | {inner: value} if inner else value}


MANY = 20
"""Rows of an engine from which on its own share inside counts."""


def enough(groups, constants, each):
    """Whether 95 % of the rows are inside, all groups of equal weight; with ``each``, of every larger group too."""
    shares = [inside(g, constants)[0] for g in groups]
    large = [s for g, s in zip(groups, shares, strict=True) if each and len(g) >= MANY]
    return min(statistics.fmean(shares), *large, 1.0) >= 0.95


def least(groups, name, constants):
    """The least value of a constant, in steps of 0.01, with which enough rows are inside."""
    each = name.startswith("ENGINE")
    values = (step / 100 for step in range(1000))
    return next(v for v in values if enough(groups, changed(constants, name, v), each))


def interval_classes(fixed, served, foreign):
    """{(what is judged, the constant behind it): {engine: cases}}, in the order in which constants are fitted: each
    given those before it, none of which depends on it."""
    classes = defaultdict(lambda: defaultdict(list))
    for engine, case in fixed:
        if case.known.engine and first_token(case):
            classes["fixed batches, TTFT", "FIRST generate"][engine].append(case)
    for constant, alone in (("FIRST serve", False), ("LOAD", True)):
        for engine, case in served:
            if first_token(case) and case.group.endswith(serving.ALONE) == alone:
                classes[f"serving, TTFT{serving.ALONE if alone else ''}", constant][engine].append(case)
    for engine, case in served:
        if not first_token(case):
            alone = serving.ALONE if case.group.endswith(serving.ALONE) else ""
            classes[f"serving, TPOT{alone}", ""][engine].append(case)
    elsewhere = [(e, c) for e, c in fixed if not c.known.engine]
    for engine, case in (*foreign, *elsewhere):
        alone = case.group.endswith(serving.ALONE)
        if first_token(case) and task_of(case) == "serve" and not alone:
            continue  # nobody knows the load of an engine that was not measured
        if first_token(case) or not alone:
            part = "first" if first_token(case) else "token"
            classes[f"engine not measured, {case.quantity[:4].upper()}", f"ENGINE {part}"][engine].append(case)
    return classes


def intervals(fixed, served, foreign):
    """The table of intervals, and {constant: (shipped, fitted)}."""
    print(f"\n{'intervals: inside, mean factor':58} {'n':>4} {'stated':>12} {'left out':>12}")
    rows, now, fit, fitted = [], shipped(), shipped(), {}
    for (what, constant), groups in interval_classes(fixed, served, foreign).items():
        if constant:
            best = least([*groups.values()], constant, fit)
            fit = changed(fit, constant, best)
            outer, _, inner = constant.partition(" ")
            fitted[constant] = {"shipped": now[outer][inner] if inner else now[outer], "fitted": best}
        for engine, cases in groups.items():
            others = [g for e, g in groups.items() if e != engine]
            row = {"class": what, "engine": engine, "n": len(cases), "stated": inside(cases, now)}
            if constant and others:
                without = least(others, constant, fit)
                row |= {"constant": constant, "left_out_constant": without,
                        "left_out": inside(cases, changed(now, constant, without))}  # fmt: skip
            rows.append(row)
            texts = [f"{row[k][0]:6.1%} x{row[k][1]:.2f}" if k in row else "" for k in ("stated", "left_out")]
            print(f"{what + ': ' + engine:58} {row['n']:4} " + " ".join(f"{t:>12}" for t in texts))
    print("\nconstants of intervals: shipped, fitted given those before")
    for name, both in fitted.items():
        print(f"{name:20} {both['shipped']:.3f} {both['fitted']:.3f}")
    return rows, fitted


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
    report, judged = {}, {}
    rows = {}
    for name, schema in (("generation", generation), ("generation_engines", generation), ("serving", serving)):
        path = args.data / f"{name}.csv"
        if not path.is_file():
            sys.exit(f"no {path.name} in {args.data}")
        rows[name] = list(read_table(path))
        errors, skipped, judged[name] = judge(rows[name], schema)
        report[name] = table(path.name, errors, skipped)
    errors, skipped, _ = judge(contained(rows["generation_engines"]), generation)
    report["generation_engines, in containers"] = table("generation_engines.csv, in containers", errors, skipped)
    errors, skipped, foreign = left_out(rows["serving"])
    report["serving, engines left out"] = table("serving.csv, engines left out", errors, skipped)
    fixed = [*judged["generation"], *judged["generation_engines"]]
    report["intervals"], report["interval_constants"] = intervals(fixed, judged["serving"], foreign)
    report["speed"] = speed()
    print(f"\nGPT-3 175B on 4 A100, prefill and 1000 tokens: {report['speed']['gpt3_1000_tokens_s'] * 1e3:.1f} ms")
    print(f"simulated requests per minute: {report['speed']['requests_per_minute']:,.0f}")
    if args.json:
        args.json.write_text(json.dumps({**report, "environment": fingerprint()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
