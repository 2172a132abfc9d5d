"""``ridgeline train --backend NAME``: the loop around a foreign engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline.jobs.job import RankContext, TrainOptions
from ridgeline.measure.backends import engine_versions, make_engine
from ridgeline.spec.experiment import Experiment
from ridgeline.train.trainer import StepStats
from ridgeline.train.training_loop import on_stop_signal


def train(e: Experiment, options: TrainOptions, here: RankContext) -> dict[str, Any]:
    """Train to ``workload.steps`` with ``options.backend``; the result is that of
    :func:`ridgeline.train.training_loop.train`, without checkpoints. Ctrl-C or SIGTERM finishes the step.
    """
    engine: Any = make_engine(options.backend, e, here.device, here.rank, here.ranks)
    losses: list[float] = []
    interrupts: list[int] = []

    def watch(stats: StepStats) -> bool:
        losses.append(stats.loss)
        here.report({"step": stats.step + 1, "steps": e.training.steps, "loss": stats.loss, "tokens": stats.tokens,
                "seconds": stats.seconds, "grad_norm": stats.grad_norm})  # fmt: skip
        return _any_rank(bool(interrupts), here.device, here.ranks)

    with on_stop_signal(lambda: interrupts.append(1)):
        here.report({"stage": "training", "step": 0, "steps": e.training.steps})
        engine.drive(watch)
    stopped = len(losses) < e.training.steps
    if options.export and not stopped:
        engine.export(Path(options.export))
    return {"losses": losses, "step": len(losses), "stopped": stopped, "checkpoint": "", "device_peak_bytes": None,
            "traffic": {}, **engine_versions(options.backend)}  # fmt: skip


def _any_rank(here: bool, device: torch.device, ranks: int) -> bool:
    flag = torch.tensor(float(here), device=device)
    if ranks > 1:
        torch.distributed.all_reduce(flag)
    return bool(flag)
