"""Every way of fine-tuning on one task: held-out loss at equal tokens, time and memory, predicted and measured.

    ridgeline probe
    ridgeline ablate examples/finetune.toml --json > ablation.json
    python benchmarks/finetune_methods.py ablation.json [--out benchmarks/results/finetune.json]

Keeps what the table in docs/finetuning.md rests on, and prints that table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def row(outcome: dict) -> dict:
    measured, predicted = outcome["measured"], outcome["predicted"]
    m, p = ({k: v["value"] for k, v in r["metrics"].items()} for r in (measured, predicted))
    step = measured["metrics"]["step_time_s"]
    return {
        "method": outcome["name"], "plan": outcome["plan"], "lr": measured["experiment"]["workload"]["lr"],
        "trained_parameters": p["trained_parameters"],
        "held_out_loss": {"before": m["eval_loss_start"], "after": m["eval_loss"]},
        "training_losses": [round(s["loss"], 5) for s in measured["samples"]],
        "step_s": {"measured": step["value"], "low": step["low"], "high": step["high"], "predicted": p["step_time_s"]},
        "seconds": [round(s["seconds"], 4) for s in measured["samples"]],
        "peak_bytes": {"measured": m["peak_bytes"], "predicted": p["peak_bytes"]},
        "memory_measured": {c["category"]: c["bytes"] for c in measured["memory"]},
        "memory_predicted": {c["category"]: c["bytes"] for c in predicted["memory"]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ablation", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/finetune.json"))
    args = parser.parse_args()
    ablation = json.loads(args.ablation.read_text())
    first = ablation["outcomes"][0]["measured"]
    workload = {k: v for k, v in first["experiment"]["workload"].items() if k not in ("lr", "checkpoint")}
    rows = [row(o) for o in ablation["outcomes"] if o["measured"]]
    result = {
        "command": "ridgeline ablate examples/finetune.toml", "created": ablation["created"],
        "environment": {**ablation["environment"], "threads": first["environment"]["threads"]},
        "model": first["experiment"]["model"]["name"], "workload": workload, "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1))
    print("| method | trains | held-out loss | step, predicted \\| measured | peak memory, predicted \\| measured |")
    print("|---|--:|--:|--:|--:|")
    for r in sorted(rows, key=lambda r: r["held_out_loss"]["after"]):
        step, peak = r["step_s"], r["peak_bytes"]
        name = " ".join(name_of(c) for c in r["plan"]) or "AdamW, all parameters"
        cells = [
            f"`{name}`",
            f"{r['trained_parameters'] / 1e6:.2f} M",
            f"{r['held_out_loss']['after']:.3f}",
            f"{step['predicted'] * 1e3:.0f} \\| {step['measured'] * 1e3:.0f} ms",
            f"{peak['predicted'] / 2**20:.0f} \\| {peak['measured'] / 2**20:.0f} MiB",
        ]
        print("| " + " | ".join(cells) + " |")


def name_of(call: str) -> str:
    """A technique and those of its options that tell the rows apart."""
    name, _, options = call.partition(":")
    told = [o for o in options.split(",") if o in ("dora=True", "dora=true", "norm=none", "norm=global")]
    return name + (":" + ",".join(told).lower() if told else "")


if __name__ == "__main__":
    main()
