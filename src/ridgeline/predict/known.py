"""What is known of a prediction beside its operators, in words and in its interval: the same for all that state one."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.catalog import published_format
from ridgeline.predict.interval import Known, add_intervals
from ridgeline.predict.machine import machine
from ridgeline.predict.serving.engine_costs import find_engine
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Technique

ALIKE = 0.03
"""Coefficient of variation of lengths up to which the clients of a closed loop start and wait in step; how far they do
is a property of the load generator, which lengths alone do not tell."""


def state(e: Experiment, techniques: Sequence[Technique], result: Result) -> Known:
    """Give every metric of ``result`` its interval, and its notes the reasons for a wider one."""
    waiting = result.metrics["waiting_share"].value if "waiting_share" in result.metrics else 0.0
    known, notes = known_of(e, techniques, waiting)
    result.notes += notes
    add_intervals(result.metrics, result.breakdown, e.task, known)
    return known


def known_of(e: Experiment, techniques: Sequence[Technique], waiting: float) -> tuple[Known, list[str]]:
    """What is known of the prediction of a resolved experiment, and in words what is not. ``waiting``: share of the
    mean time to first token that requests wait for others."""
    notes, device = [], e.cluster.device
    dtypes = {e.dtype, *(getattr(t, "dtype", "") for t in techniques)}
    if device.kind == "gpu" and "bf16" in dtypes and "bf16" not in device.peak_flops and "fp16" in device.peak_flops:
        notes.append(f"{device.name} has no arithmetic in bf16: predicted at its rate in fp16, which dtype=fp16 states")
    notes += _published(e)
    notes += [
        f"sm_count of {part.device.name} is not known: predicted with {machine(part.device).units}, by its peaks"
        for part in e.cluster.parts or (e.cluster,)
        if part.device.kind == "gpu" and not part.device.sm_count
    ]
    ranks = e.world if e.is_training else e.world // e.data_parallel
    if device.link and device.link.server and min(ranks, e.cluster.devices_per_node) > device.link.spans[0][0]:
        notes.append(
            f"bandwidth between {device.name} is that of {device.link.server}, from which others may differ much"
        )
    unlike = [what for t in techniques if (what := t.unproven(e.task))]
    if unlike and device.kind == "gpu":
        notes.append(f"wider interval: no published measurement was at hand of {', '.join(unlike)} in {e.task}")
    name = getattr(e.workload, "engine", "")
    engine = find_engine(name, device) if name or e.task == "serve" else None
    fitted = engine is None or device.name in engine.fitted_on
    if not fitted:
        notes.append(f"wider interval: no measurement of this engine on {device.name} was at hand")
    if not in_step(e):
        waiting = 0.0
    elif waiting:
        notes.append(
            "wider interval of the time to first token: clients with requests of about one length stay in step, real"
            " ones may not; length_cv of the workload says how much lengths vary"
        )
    return Known(not unlike, fitted, waiting, reserved_by(e)), notes


def _published(e: Experiment) -> list[str]:
    """That a model's weights are published in fewer bits than the plan has them in, where nothing is trained."""
    name = published_format(e.model.name)
    if e.is_training or not name or has(e, "weights") or has(e, "experts"):
        return []
    return [f"the weights of {e.model.name} are published in {name}, and predicted in {e.dtype}: --with {name} predicts"
            " them as published"]  # fmt: skip


def reserved_by(e: Experiment) -> str:
    """Why an experiment's peak memory is known less well than what it allocates, as a key of ``RESERVED``."""
    if not e.is_training or e.cluster.device.kind != "gpu":
        return ""
    return "stages" if "pp" in e.parallel else "allocator"


def in_step(e: Experiment) -> bool:
    """Whether clients wait for each other's answers in step, as far as the workload says."""
    w = e.workload
    return isinstance(w, Serve) and w.concurrency is not None and max(w.length_cv, w.output_cv or 0.0) <= ALIKE
