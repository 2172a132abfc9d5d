"""GrowLength against a fixed length, in one run: loss at full length over time, at equal tokens.

    python benchmarks/growlength.py [--steps 120] [--length 512] [--json FILE]

Both train the same model on the same stream of tokens in turn, step by step, so that both see the same machine; the
loss is that of one held-out batch at full length. Reported is the time at which each first reaches the fixed length's
last loss, or the grown run's, whichever is higher.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from ridgeline.jobs.malloc import keep_freed_memory
from ridgeline.measure.environment import fingerprint
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import normalize
from ridgeline.train.trainer import Trainer


def experiment(steps, length, plan):
    model = ModelSpec(
        name="grow", family="llama", vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=4,
        head_dim=32, intermediate_size=352, max_positions=length,
    )  # fmt: skip
    workload = Pretrain(seq_len=length, batch_size=4, steps=steps, warmup_steps=5, lr=2e-3)
    cluster = Cluster(device=CPU, devices_per_node=1)
    return normalize(Experiment(model=model, cluster=cluster, workload=workload, plan=Plan.parse(plan)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    eighth = args.length // 8
    plans = {"fixed": (), "growlength": (f"growlength:lengths={eighth}+{2 * eighth}+{4 * eighth}",)}
    made = {name: experiment(args.steps, args.length, plan) for name, plan in plans.items()}
    trainers = {name: Trainer(e) for name, e in made.items()}
    spent = dict.fromkeys(plans, 0.0)
    curves = {name: [(0, 0.0, t.evaluate())] for name, t in trainers.items()}
    for step in range(1, args.steps + 1):
        for name, trainer in trainers.items():
            begun = time.perf_counter()
            trainer.step()
            spent[name] += time.perf_counter() - begun
            if step % args.every == 0:
                curves[name].append((step, spent[name], trainer.evaluate()))
    goal = max(min(loss for *_, loss in curve) for curve in curves.values())
    reached = {name: next(s for _, s, loss in curve if loss <= goal) for name, curve in curves.items()}
    times = {name: predict(e).metrics["step_time_s"].value for name, e in made.items()}
    out = {
        "steps": args.steps, "length": args.length, "tokens": args.steps * 4 * args.length,
        "seconds": spent, "curves": curves, "loss_reached": goal, "seconds_to_it": reached,
        "speedup_to_same_loss": reached["fixed"] / reached["growlength"],
        "speedup_per_token": spent["fixed"] / spent["growlength"],
        "predicted_speedup_per_token": times["fixed"] / times["growlength"],
        "environment": fingerprint(),
    }  # fmt: skip
    for name, curve in curves.items():
        print(name, f"{spent[name]:.1f} s, last loss {curve[-1][2]:.4f}, loss {goal:.4f} after {reached[name]:.1f} s")
    if args.json:
        args.json.write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
