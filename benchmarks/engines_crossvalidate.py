"""Engine constants, cross-validated: fitted without one tensor-parallel degree or one model, judged on it.

    python benchmarks/engines_crossvalidate.py DATA_DIR [--engine NAME] [--json FILE]

Every fold starts from the same round numbers, not from the shipped constants, and takes a few damped Gauss-Newton steps
on the logarithms of constants and times (residuals are clipped, so that odd rows pull little).
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.predict.serving import engine_costs as engine
from ridgeline.spec.errors import UserError
from ridgeline.validate import generation_rows as generation
from ridgeline.validate import serving_rows as serving
from ridgeline.validate.csv_table import BadCell, read_table

START = {
    "vllm-2023": {"dispatch_s": 3e-5, "iteration_s": 3e-3, "sequence_s": 2e-4, "request_s": 2e-2, "spill_s": 5e-5},
    "vllm": {"iteration_s": 1e-3, "sequence_s": 3e-5, "prefill_s": 5e-3, "request_s": 2e-2, "prefill_share": 0.7,
             "expand_share": 0.5},
    "trtllm": {"iteration_s": 1e-3, "schedule_s": 5e-3, "sequence_s": 5e-5, "prefill_s": 1e-2, "request_s": 4e-2,
               "prefill_share": 0.7},
}  # fmt: skip
CLIP = 0.4
STEPS = 4


def rows_of(data, schema, name):
    """The distinct rows of one engine."""
    found = {}
    for row in read_table(data / f"{schema.NAME}.csv"):
        if row.text("backend", generation.ENGINE) == name:
            found.setdefault(tuple(row.cells[c] for c in schema.REQUIRED[:-2]), row)
    return list(found.values())


def errors(schema, rows, name, constants):
    """log(predicted / measured) of both quantities of every row: shape (rows, 2)."""
    shipped = engine.ENGINES[name]
    engine.ENGINES[name] = replace(shipped, **constants)
    try:
        out = []
        for row in rows:
            try:
                cases = [c for c in schema.cases(row) if not c.group.endswith(serving.ALONE)]
                out.append([np.log(c.predicted / c.measured) for c in cases])
            except (UserError, BadCell):
                continue
        return np.array(out)
    finally:
        engine.ENGINES[name] = shipped


def fit(schema, rows, name):
    """Constants that fit ``rows``."""
    keys = list(START[name])
    at = np.log([START[name][k] for k in keys])

    def residuals(x):
        constants = dict(zip(keys, np.exp(x), strict=True))
        constants |= {k: min(1.0, v) for k, v in constants.items() if k.endswith("share")}
        return np.clip(errors(schema, rows, name, constants).ravel(), -CLIP, CLIP)

    step = 0.15
    for _ in range(STEPS):
        here = residuals(at)
        slopes = np.stack([(residuals(at + step * unit) - here) / step for unit in np.eye(len(keys))], axis=1)
        normal = slopes.T @ slopes + 0.02 * len(here) * 0.05 * np.eye(len(keys))
        at = at + np.clip(np.linalg.solve(normal, -slopes.T @ here), -0.7, 0.7)
    return {k: float(min(1.0, v)) if k.endswith("share") else float(v)
            for k, v in zip(keys, np.exp(at), strict=True)}  # fmt: skip


def folds(rows):
    """(label, left-out rows, the rest) by tensor-parallel degree and by model, where there are several."""
    for column in ("tp", "model"):
        values = sorted({r.cells[column] for r in rows})
        for value in values if len(values) > 1 else []:
            inside = [r for r in rows if r.cells[column] == value]
            if len(inside) >= 5:
                yield f"without {column} {value.split('/')[-1]}", inside, [r for r in rows if r.cells[column] != value]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--every", type=int, default=3, help="fit on every so many-th row")
    parser.add_argument("--engine", choices=list(START), help="only this one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = []
    print(f"{'engine':10} {'fold':38} {'n':>4} {'TTFT median':>12} {'mean':>7} {'TPOT median':>12} {'mean':>7}")
    for name in [args.engine] if args.engine else START:
        schema = generation if name == "vllm-2023" else serving
        for label, inside, rest in folds(rows_of(args.data, schema, name)):
            constants = fit(schema, rest[:: args.every], name)
            size = np.abs(np.exp(errors(schema, inside, name, constants)) - 1)
            median, mean = np.median(size, axis=0), size.mean(axis=0)
            report.append({"engine": name, "fold": label, "n": len(size), "constants": constants,
                           "ttft_median": median[0], "ttft_mean": mean[0], "tpot_median": median[1],
                           "tpot_mean": mean[1]})  # fmt: skip
            numbers = f"{median[0]:12.1%} {mean[0]:7.1%} {median[1]:12.1%} {mean[1]:7.1%}"
            print(f"{name:10} {label:38} {len(size):4} {numbers}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
