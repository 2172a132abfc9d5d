"""Systems of the literature against their papers: our prediction for the paper's model and cluster."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.predict.predict import resting_bytes
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.system import System


class Reproduction(NamedTuple):
    """A system's prediction beside what its paper reports."""

    system: System
    experiment: Experiment
    result: Result
    predicted: float | None
    """The quantity that the paper reports; None: it reports none that can be compared."""
    factor: float
    """Half the width of its own 95 % interval, as a factor."""

    @property
    def ratio(self) -> float | None:
        """Predicted over reported, counted alike."""
        reported = self.system.reported
        return None if self.predicted is None else self.predicted / reported.value / reported.apart

    @property
    def holds(self) -> bool:
        """Whether the plan fits the paper's cluster, and the number lies in the prediction's own interval."""
        r = self.ratio
        near = r is None or 1 / self.factor <= r <= self.factor
        return self.result.status == "ok" and near


def reproduce(system: System) -> Reproduction:
    """Predict the paper's own experiment."""
    reported = system.reported
    e = experiments.make(
        reported.model, reported.on, reported.workload, [system.name], system.name, f"system {system.name}"
    )
    result = predict(e)
    predicted: float | None = None
    if reported.quantity == "states_bytes":
        predicted = sum(resting_bytes(e).values())
    elif reported.quantity == "speedup":
        base = predict(
            experiments.make(reported.model, reported.on, reported.workload, reported.against, where=system.name)
        )
        predicted = result.metrics["tokens_per_s"].value / base.metrics["tokens_per_s"].value
    elif reported.quantity:
        predicted = result.metrics[reported.quantity].value
    held = result.metrics["peak_bytes" if reported.quantity == "states_bytes" else "tokens_per_s"]
    factor = held.high / held.value if held.high else 1.0
    return Reproduction(system, e, result, predicted, factor)
