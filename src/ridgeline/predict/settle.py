"""The predictor's interface for techniques that resolve options that were left open."""

from __future__ import annotations

from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Memory, Metric, Result
from ridgeline.techniques.registry import check, normalize, resolve


def settled(e: Experiment) -> Experiment:
    """The normalized, checked experiment in which the predictor has resolved what techniques left open.

    Resolving again changes nothing. Raises :class:`Incompatible` if no choice is feasible.
    """
    return resolve(e, ask)[0]


def ask(e: Experiment) -> Result:
    """The predicted Result of an experiment without breakdown: metrics and memory by category (about a ms).

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
