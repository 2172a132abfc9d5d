"""Ranks of a training run killed with SIGKILL at random steps; the losses beside those of an undisturbed run.

    python benchmarks/elastic.py --minutes 30 --ranks 2 --json benchmarks/results/elastic.json

Trains with ``elastic`` and ``--plan`` for so many minutes, while a rank, at random, is killed after a random number of
steps, at a random moment of the step or of the copy after it. Then trains as many steps without copies and without
kills. Counts the steps lost by each kill, the seconds from the kill to the next step, and what a copy adds to a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from math import inf
from pathlib import Path
from typing import Any

import psutil

from ridgeline.jobs.job import TrainOptions, train_job
from ridgeline.jobs.launch import run_job
from ridgeline.jobs.restart import memory_folder, run_with_restarts
from ridgeline.measure.environment import commit, fingerprint, load_average
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.registry import normalize

SPEC = ModelSpec(family="llama", vocab_size=2048, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4,
                 head_dim=64, intermediate_size=704, max_positions=256, tie_embeddings=False)  # fmt: skip
STEPS = 10**6
"""Of the experiment; a run is ended before."""


class Enough(Exception):
    """The minutes, or the steps, are over."""


class Killer:
    """Watches a run, kills its ranks, and ends it at a time or a step."""

    def __init__(self, ranks: int, every: tuple[int, int], seed: int, stop: float = inf, steps: int = STEPS) -> None:
        self.rng, self.ranks, self.every, self.stop = random.Random(seed), ranks, every, stop
        self.steps = steps
        self.losses: dict[int, list[float]] = {}
        """By step; more than one where it was computed again."""
        self.last, self.next, self.killed_at = 0, self._next(0), 0.0
        self.kills = 0
        self.again = False
        """Whether the ranks have started again since the kill."""
        self.lost: list[int] = []
        self.recovery: list[float] = []
        self.seconds: list[float] = []
        self.times: list[float] = []

    def _next(self, step: int) -> int:
        return step + self.rng.randint(*self.every)

    def watch(self, message: dict[str, Any]) -> None:
        """One message of rank 0."""
        now = time.monotonic()
        if "loss" in message:
            if self.killed_at and self.again:
                self.recovery.append(now - self.killed_at)
                self.killed_at, self.again = 0.0, False
            elif self.times and not self.killed_at:
                self.seconds.append(now - self.times[-1])
            self.times.append(now)
            self.last = message["step"]
            self.losses.setdefault(self.last, []).append(message["loss"])
            if self.last >= self.steps or (now >= self.stop and not self.killed_at):
                raise Enough
            if self.last >= self.next and not self.killed_at:
                time.sleep(self.rng.uniform(0, 2 * statistics.median(self.seconds or [0.1])))
                self._kill(self.rng.randrange(self.ranks))
                self.kills += 1
                self.killed_at, self.next = time.monotonic(), self._next(self.last)
        elif message.get("stage") == "training" and self.last:
            self.lost.append(self.last - message["step"])
            self.again = True

    def _kill(self, rank: int) -> None:
        for p in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if p.name() == f"rank {rank}":
                    p.kill()


def experiment(args: argparse.Namespace, *more: str) -> Experiment:
    """The run, with these techniques too."""
    device = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
    w = Pretrain(seq_len=64, batch_size=8, steps=STEPS, lr=1e-3, warmup_steps=10, data="stdlib-prose")
    return normalize(Experiment(model=SPEC, cluster=Cluster(device=device, devices_per_node=args.ranks), workload=w,
                                plan=Plan.parse((*args.plan, *more))))  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plan", nargs="+", default=["zero:stage=2"])
    parser.add_argument("--every", type=int, nargs=2, default=[5, 40], help="steps between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    busy = load_average()
    began = time.monotonic()
    killer = Killer(args.ranks, tuple(args.every), args.seed, stop=began + 60 * args.minutes)
    with memory_folder(None) as memory, contextlib.suppress(Enough):
        job = train_job(experiment(args, "elastic"), TrainOptions(memory=memory))
        run_with_restarts(run_job, job, killer.watch, 3)
    took = time.monotonic() - began
    calm = Killer(args.ranks, (STEPS, STEPS), 0, steps=killer.last)
    with contextlib.suppress(Enough):
        run_job(train_job(experiment(args), TrainOptions()), calm.watch)
    straight = {step: losses[0] for step, losses in calm.losses.items()}
    worst = max(abs(x / straight[step] - 1) for step, losses in killer.losses.items() for x in losses)
    copied, plain = statistics.median(killer.seconds), statistics.median(calm.seconds)
    found = {
        "plan": [*args.plan, "elastic"], "ranks": args.ranks, "steps": killer.last, "seconds": took,
        "kills": killer.kills, "steps_lost": {str(n): killer.lost.count(n) for n in sorted(set(killer.lost))},
        "worst_relative_loss_difference": worst, "first_and_last_loss": [straight[1], straight[killer.last]],
        "recovery_s": {"median": statistics.median(killer.recovery), "largest": max(killer.recovery)},
        "step_s": {"with_copies": copied, "without": plain, "ratio": copied / plain},
        "load_before": busy, "load_after": load_average(), "commit": commit(),
        "environment": fingerprint(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    continued = worst <= 1e-6 and killer.losses.keys() == straight.keys()
    if not continued or max(killer.lost) > 1 or len(killer.lost) != killer.kills:
        raise SystemExit("the run was not continued as it should be")


if __name__ == "__main__":
    main()
