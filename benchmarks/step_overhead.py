"""What the engine's hooks cost when every technique is off: its step against a loop that has none of them.

Both train the same model from the same weights on the same batches with the same optimizer and clipping, in one
process, one step of each in turn. Reported: median step time of each, their ratio with a bootstrap interval, and the
losses.

    python benchmarks/step_overhead.py [--steps 60] [--out benchmarks/results/step_overhead.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch


def bare_step(root, optimizer, parameters, batch, workload, lr) -> float:
    """Forward, backward, clipping and update as one would write them without an engine."""
    ids, labels, *_ = batch
    valid = int((labels != -100).sum())
    loss = root(ids, labels) / valid
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, workload.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_overhead.json"))
    args = parser.parse_args()

    from ridgeline.experiments import make
    from ridgeline.jobs.worker import setup
    from ridgeline.measure.environment import fingerprint
    from ridgeline.runtime.optimizer import learning_rate, make_optimizer, parameter_groups
    from ridgeline.train.trainer import Trainer

    workload = {"kind": "pretrain", "seq_len": 128, "batch_size": 2, "steps": args.steps, "lr": 1e-3}
    e = make("llama-mini", "local", workload, [])
    trainer = Trainer(e, setup(1))
    root = copy.deepcopy(trainer.run.root)
    parameters = list(root.parameters())
    optimizer = make_optimizer(parameter_groups(parameters, e.training), e.training)
    times: dict[str, list[float]] = {"engine": [], "bare loop": []}
    apart = 0.0
    for step in range(args.steps):
        losses = {}
        for name in times if step % 2 else reversed(times):
            start = time.perf_counter()
            if name == "engine":
                losses[name] = trainer.step().loss
            else:
                batch = trainer.run.data.batches.batch(step)
                lr = learning_rate(e.training, step)
                losses[name] = bare_step(root, optimizer, parameters, batch, e.training, lr)
            times[name].append(time.perf_counter() - start)
        apart = max(apart, abs(losses["engine"] - losses["bare loop"]))
    warm = args.steps // 6
    a, b = (np.array(t[warm:]) for t in times.values())
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(a), (2000, len(a)))
    ratios = np.median(a[picks], 1) / np.median(b[picks], 1)
    result = {
        "environment": fingerprint(),
        "shape": "llama-mini, batch 2 x 128, fp32, AdamW, clipping",
        "median_step_s": {name: statistics.median(t[warm:]) for name, t in times.items()},
        "ratio": float(np.median(a) / np.median(b)),
        "ratio_95": [float(x) for x in np.percentile(ratios, [2.5, 97.5])],
        "largest_difference_of_losses": apart,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "environment"}, indent=1))


if __name__ == "__main__":
    main()
