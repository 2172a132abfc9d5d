"""Dissection: an experiment's steps under PyTorch's profiler, split into module × phase × operator that add up.

Timing and dissection are separate passes: the bare steps give the undisturbed time, the profiled ones the shares; the
ratio of the two is the profiler's own disturbance and is printed.
"""

from __future__ import annotations

import statistics
import time
from pkgutil import resolve_name
from typing import Any

from torch.profiler import record_function

from ridgeline.jobs.job import DissectOptions, RankContext
from ridgeline.measure.cells.training_cell import record_memory, timed
from ridgeline.measure.profiled_steps import PHASE, StepProfiler, attribute, record_breakdown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Metric
from ridgeline.train.trainer import Trainer

_INFERENCE = {
    "generate": "ridgeline.measure.dissect_generation:dissect_generation",
    "serve": "ridgeline.measure.dissect_serving:dissect_serving",
}
"""The functions that dissect tasks other than training, imported when used: each needs other packages."""


def dissect_cell(e: Experiment, options: DissectOptions, here: RankContext) -> dict[str, Any]:
    """Bare and profiled steps of the experiment; a measured Result with its breakdown (as plain data)."""
    if e.task in _INFERENCE:
        result: dict[str, Any] = resolve_name(_INFERENCE[e.task])(e, options, here)
        return result
    return dissect_training(e, options, here)


def dissect_training(e: Experiment, options: DissectOptions, here: RankContext) -> dict[str, Any]:
    """Bare steps, profiled steps, one metered step; returns a measured Result with its breakdown (as plain data)."""
    start = time.perf_counter()
    trainer = Trainer(e, here.device, here.rank, here.ranks)
    result = timed(trainer, time.perf_counter() - start, here.report)
    here.report({"stage": "profiling"})
    profiler = StepProfiler(trainer.run.model, here.device, options.trace if here.rank == 0 else None)
    for _ in range(options.profiled):
        for _ in range(2):  # bare steps between
            trainer.step()
        with profiler.step():
            _phased_step(trainer)
    rows, total = attribute(profiler.roots[""], options.profiled)
    step = statistics.median(s.seconds for s in result.samples[len(result.samples) // 2 :])
    tokens = result.samples[0].tokens
    result.metrics["step_time_s"] = Metric(value=step, unit="s", better="lower", source="median of bare steps")
    result.metrics["tokens_per_s"] = Metric(value=tokens / step, unit="tokens/s", better="higher", source="bare steps")
    record_breakdown(result, rows, total, step, "profiled_step_s", "step")
    here.report({"stage": "memory"})
    record_memory(result, trainer)
    return result.model_dump(mode="json", by_alias=True)


def _phased_step(trainer: Trainer) -> None:
    """One training step with its phases marked."""
    step = trainer.steps_done
    with record_function(f"{PHASE}forward+backward"):
        trainer.forward_backward(step)
    with record_function(f"{PHASE}optimizer"):
        trainer.update(step)
    trainer.steps_done += 1
