"""Automatic parallelization: the fastest plan that a method finds, and how it compares with the best preset."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.predict.quick import Quick
from ridgeline.search.auto.alpa import refine
from ridgeline.search.auto.explore import TRIALS, SearchSpace, descend
from ridgeline.search.auto.points import Point, Simulator, narrowed, sharder
from ridgeline.search.found import Tried
from ridgeline.search.question import Question
from ridgeline.search.search import search
from ridgeline.search.settle import settle
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sharding import Sharding

METHODS = ("alpa", *TRIALS)
"""Methods by name; ``alpa`` starts from the planner's presets."""
POLISH = 200
"""Predictions for the last descent of method alpa."""
BUDGET = 2000
"""Predictions of the other methods."""

Progress = Callable[[int, int], None]


@dataclass
class AutoParallel:
    """The answer of a method."""

    method: str
    experiment: Experiment
    point: Point
    quick: Quick
    preset: Tried | None
    """The best preset, where the method looked at them."""
    predictions: int
    """Plans that the method predicted, without the presets."""
    seconds: float
    """Time of the whole search."""
    preset_seconds: float
    """The part of it that went into the presets."""

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return self.quick.metrics["step_time_s"]

    @property
    def gain(self) -> float | None:
        """How many times as fast as the best preset; None: presets were not looked at."""
        return None if self.preset is None else self.preset.metrics["step_time_s"] / self.step

    def stages(self) -> list[dict[str, object]]:
        """One row per stage: layers, ranks, and the strategies of its parts."""
        e = self.experiment
        cut = self.point.cut(e)
        plan = self.point.sharding
        if plan is None and sharder(self.point.preset):
            plan = Sharding.uniform("reduce", e.model.num_layers)
        pp = e.parallel.get("pp", 1)
        each = e.world // pp
        rows: list[dict[str, object]] = []
        start = 0
        for k, n in enumerate(cut):
            first = (k % pp) * each
            row: dict[str, object] = {
                "stage": k, "layers": f"{start}-{start + n - 1}", "ranks": f"{first}-{first + each - 1}",
                "mesh": " x ".join(f"{a} {d}" for a, d in (("dp", e.data_parallel), *e.parallel.items()) if a != "pp"),
            }  # fmt: skip
            if plan is not None:
                row["embed"] = plan.embed if k == 0 else ""
                row["attention"] = _spans(plan.attention[start : start + n], start)
                row["mlp"] = _spans(plan.mlp[start : start + n], start)
                row["head"] = plan.head if k == len(cut) - 1 else ""
            rows.append(row)
            start += n
        return rows


def _spans(strategies: tuple[str, ...], start: int) -> str:
    """``batch``, or ``batch 0-3, scatter 4-7``."""
    if len(set(strategies)) == 1:
        return strategies[0]
    out, at = [], 0
    while at < len(strategies):
        end = at
        while end < len(strategies) and strategies[end] == strategies[at]:
            end += 1
        span = f"{start + at}-{start + end - 1}" if end - at > 1 else str(start + at)
        out.append(f"{strategies[at]} {span}")
        at = end
    return ", ".join(out)


def auto_parallel(
    question: Question, method: str = "alpa", workers: int = 2, progress: Progress | None = None, seed: int = 0,
    budget: int = BUDGET,
) -> AutoParallel | None:  # fmt: skip
    """The fastest plan that ``method`` finds within the device's memory; None if it finds none.

    Raises :class:`UserError` for an unknown method, and for questions that it does not answer (see
    :func:`~ridgeline.search.auto.points.narrowed`).
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    start = time.perf_counter()
    q = narrowed(question)
    if not q.only:
        raise UserError("no technique is left to combine", "name fewer with --forbid, or other ones with --only")
    step = progress or (lambda done, of: None)
    simulator = Simulator(q)
    preset, spent = None, 0.0
    if method == "alpa":
        answer = search(q, workers, progress)
        fitting = [*answer.found.fitting.values()]
        spent = time.perf_counter() - start
        preset = min(fitting, key=lambda t: t.metrics["step_time_s"], default=None)
        refine(fitting, simulator, step)
        if simulator.best:
            descend(simulator.best[0], simulator, POLISH)
    else:
        settled = settle(q, simulator.base)
        simulator.watch = lambda calls: step(min(calls, budget), budget)
        TRIALS[method](SearchSpace(simulator, settled.techniques, settled.names), budget, seed)
    if simulator.best is None:
        return None
    point, found = simulator.best
    e, _ = point.experiment(simulator.base)
    return AutoParallel(method, e, point, found, preset, simulator.calls, time.perf_counter() - start, spent)
