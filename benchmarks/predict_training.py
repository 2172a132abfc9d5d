"""Predicted against measured training runs: the error as shipped, and cross-validated by model size.

    python benchmarks/predict_training.py DATA_DIR [--json benchmarks/results/predict_training.json]

``DATA_DIR`` holds ``training.csv``, ``training_memory_selene.csv`` and, if there is one, ``finetuning.csv`` in the
schemas of ``ridgeline validate``. Beside the shipped constants the script fits the in-step factors anew (see
``predict/step/in_step.py``), leaving out all runs of one model size or of one family (a software on a device) at a
time, and prints the error on the runs left out. The baseline is one constant per group: the
utilization that fits the group best.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from ridgeline.predict.predict import predict
from ridgeline.predict.step import in_step
from ridgeline.spec.errors import UserError
from ridgeline.validate import finetuning_rows as finetuning
from ridgeline.validate import memory_rows as memory
from ridgeline.validate import training_rows as training
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import BadCell, read_table

KINDS = in_step.GROUPS


@dataclass
class Run:
    """One measured run: its case, its size, and the predicted seconds by kind as the in-step factors scale them."""

    case: Case
    size: str
    family: str
    regime: str
    parts: np.ndarray
    rest: float

    def error(self, factors: np.ndarray) -> float:
        """Signed relative error of the predicted quantity when the kinds' seconds are scaled by ``factors``."""
        old, new = self.rest + self.parts.sum(), self.rest + float(self.parts @ factors)
        ratio = new / old if self.case.better == "lower" else old / new
        return self.case.predicted * ratio / self.case.measured - 1


def runs(path: Path) -> tuple[list[Run], list[str]]:
    """Every judged row of a training table, and why the others are not."""
    found, skipped = [], []
    for row in read_table(path):
        try:
            case = training.cases(row)[0]
            e = training.experiment(row)
            result = predict(e)
        except (BadCell, UserError) as problem:
            skipped.append(f"line {row.line}: {problem}")
            continue
        parts = dict.fromkeys(KINDS, 0.0)
        generation = e.plan.option("flash_attention", "generation")
        biased = e.model.position == "alibi" or generation == 1
        fused = e.plan.option("fused_layers", "elementwise")
        for r in result.breakdown:
            if r.phase in ("forward", "backward"):
                name = in_step.group(r.kind, in_step.BIASED if r.kind == "attention" and biased else "")
                if name:
                    parts["fused" if fused and name == "pointwise" else name] += r.seconds
        values = np.array([parts[k] for k in KINDS])
        rest = result.metrics["step_time_s"].value - values.sum()
        size = re.sub(r"-\d+-.*", "", row.text("id", e.model.name))
        parallel = "tp/pp" if e.parallel else "sharded"
        recompute = "full" if e.plan.has("recompute") else "none"
        regime = f"{parallel}, recompute {recompute}, {'long' if e.training.seq_len > 8192 else 'short'} sequences"
        family = f"{re.split('-', size)[0]} on {e.cluster.device.name}"
        found.append(Run(case, size, family, regime, values, rest))
    return found, skipped


def fit(sample: list[Run], prior: float = 0.02) -> np.ndarray:
    """Paces with the least mean absolute error; ``prior`` holds each near 1 where the sample does not tell."""

    def loss(x: np.ndarray) -> float:
        return float(np.mean([abs(r.error(x)) for r in sample]) + prior * np.mean((x - 1) ** 2))

    start = np.ones(len(KINDS))
    return minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-5}).x


def left_out(found: list[Run], key: str = "size") -> dict[str, list[float]]:
    """Errors on each model size (or family) when the in-step factors are fitted on the others."""
    errors = {}
    for value in sorted({getattr(r, key) for r in found}):
        factors = fit([r for r in found if getattr(r, key) != value])
        errors[value] = [r.error(factors) for r in found if getattr(r, key) == value]
    return errors


def one_constant(found: list[Run]) -> list[float]:
    """Errors of the best single utilization per group."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for r in found:
        groups[r.case.group].append(r)
    errors = []
    for group in groups.values():
        ratios = np.array([r.case.measured * r.case.terms[0] if r.case.inverse else r.case.terms[0] / r.case.measured
                           for r in group])  # fmt: skip
        best = min(ratios, key=lambda c: float(np.mean(np.abs(c / ratios - 1))))
        errors += list(best / ratios - 1)
    return errors


def score(errors: list[float]) -> dict[str, float]:
    """Mean, median, 90th percentile of |error|; bias; n."""
    e = np.abs(errors)
    return {"n": len(e), "mean": float(e.mean()), "median": float(np.median(e)), "p90": float(np.quantile(e, 0.9)),
            "bias": float(np.mean(errors))}  # fmt: skip


def by(found: list[Run], errors: list[float], key: str) -> dict[str, dict[str, float]]:
    """The score of each value of an attribute."""
    groups: dict[str, list[float]] = defaultdict(list)
    for r, e in zip(found, errors, strict=True):
        groups[getattr(r, key)].append(e)
    return {name: score(values) for name, values in sorted(groups.items())}


def memory_scores(path: Path) -> dict[str, dict[str, float]]:
    """Errors of the published memory study by quantity."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in read_table(path):
        for case in memory.cases(row):
            groups[case.quantity].append(case.error)
    return {name: score(values) for name, values in groups.items()}


def finetuning_scores(path: Path) -> dict[str, dict[str, float]]:
    """Errors of published fine-tuning runs by method: none was fitted."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in read_table(path) if path.exists() else ():
        for case in finetuning.cases(row):
            length = "short" if row.count("seq_len") < 2048 else "2048 tokens and more"
            groups[f"{row.text('method')}, {length}"].append(case.error)
            groups["all"].append(case.error)
    return {name: score(values) for name, values in sorted(groups.items())}


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, s in table.items():
        print(f"  {name:52s} n {s['n']:3d}  mean {s['mean']:6.1%}  median {s['median']:6.1%}  p90 {s['p90']:6.1%}"
              f"  bias {s['bias']:+6.1%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found, skipped = runs(args.data / "training.csv")
    shipped = [r.case.error for r in found]
    folds, families = left_out(found), left_out(found, "family")
    refitted = fit(found)
    report: dict[str, Any] = {
        "overall": {
            "as shipped": score(shipped),
            "refitted": score([r.error(refitted) for r in found]),
            "leave one size out": score([e for errors in folds.values() for e in errors]),
            "leave one family out": score([e for errors in families.values() for e in errors]),
            "one constant per group": score(one_constant(found)),
        },
        "by family, as shipped": by(found, shipped, "family"),
        "by family, left out": {name: score(errors) for name, errors in families.items()},
        "by size, left out": {size: score(errors) for size, errors in folds.items()},
        "by regime, as shipped": by(found, shipped, "regime"),
        "fine-tuning, as shipped": finetuning_scores(args.data / "finetuning.csv"),
        "memory": memory_scores(args.data / "training_memory_selene.csv"),
    }
    for title, table in report.items():
        show(title, table)
    report["in-step factors"] = {"relative to shipped": dict(zip(KINDS, map(float, refitted), strict=True))}
    print("\nin-step factors relative to the shipped ones:", report["in-step factors"]["relative to shipped"])
    print("skipped:", *skipped, sep="\n  ") if skipped else None
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
