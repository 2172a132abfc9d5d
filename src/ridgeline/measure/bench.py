"""``bench`` and ``dissect``: one experiment, measured with its prediction beside it. No torch here."""

from __future__ import annotations

import statistics
from pathlib import Path

from ridgeline.jobs.job import DissectOptions, LaunchJob, Progress
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.measure.ablate import measure_plan, require_local
from ridgeline.measure.backends import NATIVE, require
from ridgeline.measure.merge import merge
from ridgeline.measure.utilization import add_utilization
from ridgeline.predict import predict
from ridgeline.predict.predict import serving_prompts
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result

USED = "device_used_bytes"
"""Used memory of the device: see :mod:`ridgeline.measure.device_use`."""


def bench(e: Experiment, repeats: int, progress: Progress, backend: str = NATIVE) -> tuple[Result, Result]:
    """(predicted, measured) of one experiment; each repeat runs in its own process. ``backend``: training engine."""
    require_local(e, backend=backend)
    require(backend, e)
    predicted = predict(e)
    parts = [measure_plan(e, r, memory=r == 0, progress=progress, backend=backend) for r in range(repeats)]
    measured = merge(parts) if e.is_training else merge_generation(parts)
    return with_device_use(predicted), add_utilization(measured, e)


def with_device_use(predicted: Result) -> Result:
    """With :data:`USED`, which measured results have: the peak and what the framework takes, of a rank."""
    peak = predicted.metrics.get("peak_bytes")
    more = {} if peak is None else {USED: peak.model_copy(update={"source": "peak with the framework"})}
    return predicted.model_copy(update={"metrics": {**predicted.metrics, **more}})


def merge_generation(parts: list[Result]) -> Result:
    """One Result of several generation processes: the median of each metric, its range as the interval."""
    good = [p for p in parts if p.status == "ok"]
    if not good:
        return parts[0]
    out = good[0].model_copy(deep=True)
    out.samples = [s for p in good for s in p.samples]
    for name, metric in out.metrics.items():
        values = [p.metrics[name].value for p in good if name in p.metrics]
        metric.value, metric.n = statistics.median(values), len(values)
        if len(values) > 1:
            metric.low, metric.high = min(values), max(values)
            metric.source = "median of processes; the interval is their range"
    return out


def dissect(e: Experiment, trace: Path, progress: Progress) -> tuple[Result, Result]:
    """(predicted, measured with its breakdown) of a training step, a generation, or a mean step of a serving engine; a
    measured step goes to ``trace`` as a Chrome trace.

    Raises :class:`UserError` when the profiled run fails, and for tasks that are not dissected.
    """
    require_local(e)
    require_dissectible(e)
    trace.parent.mkdir(parents=True, exist_ok=True)
    job = LaunchJob("dissect", e, DissectOptions(trace=str(trace.resolve())), ranks=e.world)
    try:
        measured = Result.model_validate(run_job(job, progress))
    except JobFailed as failure:
        raise UserError(f"the profiled run failed ({failure.status}): {failure.reason}", failure.log) from None
    predicted = predict(e)
    if e.task == "serve" and predicted.status == "ok":
        predicted.breakdown += serving_prompts(e)
    return predicted, add_utilization(measured, e)


def require_dissectible(e: Experiment) -> None:
    """Raise :class:`UserError` for an experiment whose steps cannot be profiled here."""
    if e.task == "compress":
        raise UserError("compression is not dissected", "dissect a generate or serve experiment of what it makes")
    if e.task == "serve" and not e.model.causal:
        raise UserError(f"{e.model.name} is an encoder: its serving is not dissected", "use a decoder")
