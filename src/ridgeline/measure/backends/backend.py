"""What a backend is: another engine for the same Experiment, and what it declares about itself. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ridgeline.spec.experiment import Experiment

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ridgeline.techniques.technique import Technique
    from ridgeline.train.trainer import StepStats


class TrainingEngine(Protocol):
    """One rank's training state in any engine. Constructed from (experiment, device, rank, world)."""

    experiment: Experiment
    device: torch.device
    world: int

    def evaluate(self) -> float | None:
        """Mean loss over the held-out batch, in nats per token; None when there is none."""

    def drive(self, watch: Callable[[StepStats], bool]) -> None:
        """Steps to the end of the workload, each shown to ``watch``, which returns whether to stop."""


class Foreign(TrainingEngine, Protocol):
    """An engine of another project."""

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint (rank 0), called on every rank."""


WhyNotExpressed = Callable[["Technique", Experiment], str]
"""Why a technique cannot be had with these options: a sentence "…; fix"; empty when it can."""


def always(technique: Technique, e: Experiment) -> str:
    """The technique is expressed with every option."""
    return ""


def only(why: str, **values: tuple[Any, ...]) -> WhyNotExpressed:
    """The technique is expressed when each named option has one of the given values; ``why`` says what works."""

    def reason_for(technique: Technique, e: Experiment) -> str:
        return "" if all(getattr(technique, k) in v for k, v in values.items()) else why

    return reason_for


@dataclass(frozen=True)
class BackendSpec:
    """An engine and what it declares: the techniques that it can express, and what the rest would need."""

    name: str
    title: str
    engine: str = ""
    """``module:class``; imported only to run."""
    packages: tuple[str, ...] = ()
    """What must be installed."""
    extra: str = ""
    """The optional dependencies of Ridgeline that bring them."""
    expresses: Mapping[type[Technique], WhyNotExpressed] = field(default_factory=dict)
    """What it says of each technique that it has."""
    model: Callable[[Experiment], str] = lambda e: ""
    """Why the experiment's model or workload cannot be had, as :data:`WhyNotExpressed`."""
    refused: str = ""
    """Why it cannot be driven at all."""
