"""Options that the predictor settles: a technique may leave a choice open until the experiment is known."""

from __future__ import annotations

from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Memory, Metric, Result
from ridgeline.techniques.registry import check, normalize, techniques


def settle(e: Experiment) -> Experiment:
    """The normalized experiment in which every technique has filled in what it left to the predictor.

    Techniques settle in canonical order, so that each sees what those before it chose; one that is still open predicts
    with its defaults. Settling again changes nothing. Raises :class:`Incompatible` for what no choice can satisfy.
    """
    e = normalize(e)
    for t in techniques(e.plan):
        chosen = t.settled(e, ask)
        if chosen != t:
            e = chosen.placed(e)
    return e


def ask(e: Experiment) -> Result:
    """The predicted Result of an experiment in brief: metrics and memory by category, no breakdown (about a ms).

    Raises :class:`Incompatible` for a plan that cannot work.
    """
    from ridgeline.predict.quick import quick

    e = normalize(e)
    found = quick(e, check(e), always=True)
    return Result(
        source="predicted",
        experiment_id="",
        experiment={},
        metrics={name: Metric(value=value) for name, value in found.metrics.items()},
        memory=[Memory(category=name, bytes=size) for name, size in found.peak.items()],
        status="ok" if found.fits else "infeasible",
        reason=found.blocked,
    )
