"""Changes that would make a plan fit in memory: one at a time, predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.predict.predict import predict
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.techniques.registry import registry

SHOWN = 8


class Remedy(NamedTuple):
    """A change of a plan that does not fit, and the predicted result."""

    change: str
    call: str
    """The technique to add, as ``NAME:option=value``; empty for a change of the machine or the batch."""
    peak_bytes: float
    fits: bool
    tokens_per_s: float
    lossless: bool


def remedies(e: Experiment) -> list[Remedy]:
    """Changes after which the plan needs less memory: those that make it fit first, faster ones first.

    Techniques not in the plan, half the micro-batch, and twice as many devices.
    """
    before = predict(e).metrics["peak_bytes"].value
    found = []
    for change, call, lossless, changed in _changes(e):
        try:
            r = predict(changed)
        except UserError:
            continue
        peak, rate = r.metrics["peak_bytes"].value, r.metrics.get("tokens_per_s")
        if peak < 0.99 * before:
            found.append(Remedy(change, call, peak, r.status == "ok", rate.value if rate else 0.0, lossless))
    fitting = sorted((r for r in found if r.fits), key=lambda r: (not r.lossless, -r.tokens_per_s))
    return [*fitting, *sorted((r for r in found if not r.fits), key=lambda r: r.peak_bytes)][:SHOWN]


def _changes(e: Experiment) -> Iterator[tuple[str, str, bool, Experiment]]:
    for name, cls in registry().items():
        if e.plan.has(name) or e.task not in cls.card.tasks or (e.task == "pretrain" and cls.card.bound == "falls"):
            continue
        call = Call(name=name, options=dict(cls.card.example))
        plan = Plan(calls=(*e.plan.calls, call))
        yield f"add {call}", str(call), cls.card.lossless, e.model_copy(update={"plan": plan, "parallel": {}})
    if e.is_training and e.micro_batch_size > 1:
        half = e.micro_batch_size // 2
        workload = e.workload.model_copy(update={"micro_batch_size": half})
        yield f"micro-batches of {half}", "", True, e.model_copy(update={"workload": workload})
    c = e.cluster
    more = {"devices_per_node": 2 * c.devices_per_node} if c.devices_per_node < 8 else {"nodes": 2 * c.nodes}
    cluster = c.model_copy(update=more)
    yield f"{cluster.size} devices", "", True, e.model_copy(update={"cluster": cluster, "parallel": {}})
