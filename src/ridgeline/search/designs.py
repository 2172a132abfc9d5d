"""Sweep of a space of designs on the predictor, to those that no other beats in every metric that counts.

Designs that break a limit of area, power, edge or price are dropped before anything is timed. Those left are predicted
with one plan, or each with the best plan that the planner finds for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from ridgeline.hardware.area import RETICLE_MM2, edge_mm, shoreline_mm, total_mm2
from ridgeline.hardware.cost import Cost, Verdict, Yield, cost, verdict
from ridgeline.hardware.device import chip_device, watts
from ridgeline.predict.explain import headline, tree
from ridgeline.predict.predict import predict
from ridgeline.predict.quick import quick
from ridgeline.predict.settle import ask
from ridgeline.search.design_space import STATIC, Space
from ridgeline.search.question import HIGHER, Question
from ridgeline.search.search import search
from ridgeline.spec.chip import Chip, Prices
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import resolve

FRONT = ("dollars", "tokens_per_s")
"""What a design is judged by, unless asked otherwise."""
_POOL = 200
"""Designs from which on a second process pays."""


@dataclass(slots=True)
class Design:
    """One design: what it takes, and what it gives."""

    chip: Chip
    choice: str
    area: float
    """In mm²."""
    watts: float
    cost: Cost | None
    """None: dropped before it was priced."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Predicted, and ``dollars``, ``area_mm2``, ``watts``, ``tokens_per_s_per_dollar`` of all devices together."""
    plan: tuple[str, ...] = ()
    dropped: str = ""
    """Why it is not considered."""


@dataclass(slots=True)
class Sweep:
    """The answer: every design, those on the front, and the verdict on each against the base."""

    experiment: Experiment
    """With the base as its device."""
    base: Design
    designs: list[Design]
    axes: tuple[str, ...]
    front: list[Design]
    dropped: Counter[str]
    """Number of designs by reason."""

    def verdict(self, d: Design) -> Verdict | None:
        """Throughput per dollar relative to the base; None where the base cannot run the workload."""
        if "tokens_per_s" not in self.base.metrics or d.cost is None or self.base.cost is None:
            return None
        return verdict(d.metrics["tokens_per_s"] / self.base.metrics["tokens_per_s"], d.cost, self.base.cost)

    def bounds(self, d: Design) -> dict[str, float]:
        """What bounds the time on a design: fractions of it by compute, memory, link and latency."""
        e = on_design(self.experiment, d.chip)
        if d.plan:
            from ridgeline.experiments import plan_of

            e = e.model_copy(update={"plan": plan_of(d.plan), "parallel": {}})
        r = predict(e)
        found = tree(r, headline(r)).bounds
        return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def on_design(e: Experiment, chip: Chip) -> Experiment:
    """The experiment on a cluster of this design."""
    c = e.cluster
    cluster = Cluster(device=chip_device(chip), devices_per_node=c.devices_per_node, nodes=c.nodes)
    return e.model_copy(update={"cluster": cluster})


def sweep(
    space: Space, e: Experiment, at: Prices, how: Yield = "spare", axes: Sequence[str] = FRONT,
    question: Question | None = None, workers: int = 2, progress: Callable[[int, int], None] | None = None,
) -> Sweep:  # fmt: skip
    """Every design of a space doing ``e``'s work under its plan, or under the best plan of ``question``.

    Raises :class:`UserError` for a metric that the task does not have, and where no base can be built.
    """
    found = [_static(chip, choice, space, e, at, how) for chip, choice in space.designs()]
    left = [d for d in found if not d.dropped]
    base = _static(space.base, "the base", Space(space.base, space.document, {}, {}), e, at, how)
    _timed(base, e, question, {})
    limits = {k: v for k, v in space.limits.items() if k not in STATIC}
    run = partial(_timed, e=e, question=question, limits=limits)
    timed: list[Design] = []
    if workers > 1 and len(left) >= (_POOL if question is None else 2):
        chunk = 25 if question is None else 1
        with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, get_context("fork")) as pool:
            for d in pool.map(run, left, chunksize=chunk):
                timed.append(d)
                if progress:
                    progress(len(timed), len(left))
    timed += [run(d) for d in left[len(timed) :]]  # all of them, or what a worker that was killed has left
    by_name = {d.chip.name: d for d in timed}
    found = [by_name.get(d.chip.name, d) for d in found]
    good = [d for d in found if not d.dropped]
    front = non_dominated(good, tuple(axes))
    reasons = Counter(d.dropped.partition(":")[0] for d in found if d.dropped)
    return Sweep(on_design(e, space.base), base, found, tuple(axes), front, reasons)


def _static(chip: Chip, choice: str, space: Space, e: Experiment, at: Prices, how: Yield) -> Design:
    """A design with its area, power and cost, and whether they keep the limits."""
    area, drawn = total_mm2(chip), watts(chip)
    most = min(RETICLE_MM2, space.limits.get("area_mm2", RETICLE_MM2))
    price = None
    reason = f"area: {area:.0f} mm² of {most:.0f}" if area > most else ""
    shore = min(shoreline_mm(area), space.limits.get("edge_mm", math.inf))
    if not reason and edge_mm(chip) > shore:
        reason = f"edge: {edge_mm(chip):.0f} mm of interfaces on {shore:.0f} mm"
    if not reason and drawn > space.limits.get("watts", math.inf):
        reason = f"power: {drawn:.0f} W"
    if not reason or choice == "the base":
        price = cost(chip, at, how)
        if price.total > space.limits.get("dollars", math.inf):
            reason = reason or f"price: ${price.total:,.0f}"
    return Design(chip, choice, area, drawn, price, dropped=reason)


def _timed(d: Design, e: Experiment, question: Question | None, limits: dict[str, float]) -> Design:
    """A design with its metrics; dropped where the model does not fit or a limit is broken."""
    own = on_design(e, d.chip)
    try:
        d.metrics, d.plan, reason = _planned(own, question) if question else _predicted(own)
    except Incompatible as refused:
        d.dropped = f"plan: {refused.what}"
        return d
    if reason:
        d.dropped, d.metrics = reason, {}
        return d
    assert d.cost is not None
    n, total = e.world, d.cost.total
    d.metrics |= {"dollars": n * total, "area_mm2": n * d.area, "watts": n * d.watts}
    d.metrics["tokens_per_s_per_dollar"] = d.metrics["tokens_per_s"] / (n * total)
    for name, limit in limits.items():
        value = _value(d, name)
        if (value < limit) if name in HIGHER else (value > limit):
            d.dropped = f"{name}: {value:.4g} {'below' if name in HIGHER else 'above'} {limit:.4g}"
    return d


def _predicted(e: Experiment) -> tuple[dict[str, float], tuple[str, ...], str]:
    settled, techniques = resolve(e, ask)
    q = quick(settled, techniques)
    return dict(q.metrics), (), "" if q.fits else f"memory: {q.blocked or 'the model does not fit'}"


def _planned(e: Experiment, question: Question) -> tuple[dict[str, float], tuple[str, ...], str]:
    from dataclasses import replace

    answer = search(replace(question, cluster=e.cluster), workers=1)
    if not answer.best:
        return {}, (), "plan: none fits"
    best = answer.best[0]
    return dict(best.metrics), best.calls, ""


def _value(d: Design, name: str) -> float:
    if name not in d.metrics:
        raise unknown("metric", name, d.metrics, "this task")
    return d.metrics[name]


def non_dominated(designs: list[Design], axes: tuple[str, ...]) -> list[Design]:
    """Designs that no other matches or beats in every axis, by the first axis; of equals, the first."""
    if not axes:
        raise UserError("no metric to judge designs by", f"give two, such as {','.join(FRONT)}")
    signs = [-1.0 if a in HIGHER or a == "tokens_per_s_per_dollar" else 1.0 for a in axes]
    known = [(tuple(s * _value(d, a) for s, a in zip(signs, axes, strict=True)), d) for d in designs]
    known.sort(key=lambda kd: kd[0])
    front: list[tuple[tuple[float, ...], Design]] = []
    for key, d in known:  # sorted: whoever beats it comes before it
        if not any(all(x <= y for x, y in zip(other, key, strict=True)) for other, _ in front):
            front.append((key, d))
    return [d for _, d in front]
