"""Model FLOPs utilization of single-GPU training, and what fp8, recomputation and offload cost or gain, in one run.

Every plan trains the same model on the same batches in a process of its own, in ABBA order; ratios are against the
first plan. MFU = matrix-multiply FLOPs of forward and backward, without recomputation, over step time and the
catalog's dense peak in the compute dtype. Without a GPU it only checks itself (``--on local --model llama-tiny``).

    python benchmarks/gpu/training.py --on h200 [--model llama3.2-1b] [--seq-len 4096] [--batch 4] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

BASE = ["mixed_precision", "flash_attention", "fused_layers:chunked=true"]
PLANS = {
    "bf16": BASE,
    "bf16, unfused": BASE[:2],
    "fp8": [*BASE, "fp8"],
    "recompute": [*BASE, "recompute"],
    "optimizer on the host": [*BASE, "zero_offload"],
    "activations on the host": [*BASE, "activation_offload"],
}


def experiment(args: argparse.Namespace, plan: list[str]):
    from ridgeline.experiments import make

    workload = {"kind": "pretrain", "seq_len": args.seq_len, "batch_size": args.batch, "steps": args.steps}
    return make(args.model, args.on, workload, plan)


def cell(args: argparse.Namespace) -> None:
    """One plan, in this process: step times, losses, peak memory."""
    import time

    import torch

    from ridgeline.jobs.worker import setup
    from ridgeline.train.trainer import Trainer

    device = setup(1)
    trainer = Trainer(experiment(args, PLANS[args.cell]), device)
    times, losses = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(trainer.step().loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"seconds": times, "losses": losses, "peak_bytes": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="h200", help="catalog name of this GPU: its peaks are MFU's denominator")
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_training.json"))
    parser.add_argument("--cell", choices=PLANS)
    args = parser.parse_args()
    if args.cell:
        cell(args)
        return

    from ridgeline.measure.environment import fingerprint
    from ridgeline.predict import predict

    seen: dict[str, list[dict]] = {name: [] for name in PLANS}
    passed = sys.argv[1:]
    for i in range(args.repeats):
        for name in PLANS if i % 2 == 0 else reversed(PLANS):
            done = subprocess.run(
                [sys.executable, __file__, *passed, "--cell", name], capture_output=True, text=True, check=False
            )
            if done.returncode:
                seen[name].append({"error": done.stderr.strip().splitlines()[-1:]})
            else:
                seen[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    rows = {}
    for name, cells in seen.items():
        good = [c for c in cells if "seconds" in c]
        if not good:
            rows[name] = {"failed": cells[0]["error"]}
            continue
        steps = sorted(s for c in good for s in c["seconds"][args.steps // 3 :])
        seconds = statistics.median(steps)
        said = predict(experiment(args, PLANS[name]))
        mfu = said.metrics["mfu"].value * said.metrics["step_time_s"].value / seconds
        rows[name] = {
            "step_s": seconds, "quartiles_s": [steps[len(steps) // 4], steps[3 * len(steps) // 4]],
            "tokens_per_s": args.batch * args.seq_len / seconds, "mfu": mfu, "last_loss": good[0]["losses"][-1],
            "peak_bytes": good[0]["peak_bytes"],
            "predicted": {k: said.metrics[k].value for k in ("step_time_s", "mfu", "peak_bytes")},
        }  # fmt: skip
        rows[name]["speed_ratio"] = rows["bf16"]["step_s"] / seconds if "step_s" in rows["bf16"] else None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "cell")}
    result = {"environment": fingerprint(), "settings": settings, "plans": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
