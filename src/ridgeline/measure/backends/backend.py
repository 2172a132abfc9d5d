"""The backend interface: another engine for the same Experiment, and what it supports. No torch here."""

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
        """Run the workload to its end; each step is passed to ``watch``, which returns whether to stop."""


class Foreign(TrainingEngine, Protocol):
    """An engine of another project."""

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint (rank 0), called on every rank."""


WhyNotExpressed = Callable[["Technique", Experiment], str]
"""Why a technique is not supported with these options: a sentence "…; fix"; empty if it is."""


def always(technique: Technique, e: Experiment) -> str:
    """The technique is supported with every option."""
    return ""


def only(why: str, **values: tuple[Any, ...]) -> WhyNotExpressed:
    """The technique is supported if each named option has one of the given values; ``why`` says what works."""

    def reason_for(technique: Technique, e: Experiment) -> str:
        return "" if all(getattr(technique, k) in v for k, v in values.items()) else why

    return reason_for


@dataclass(frozen=True)
class BackendSpec:
    """An engine and what it supports: its techniques, and what others would need."""

    name: str
    title: str
    engine: str = ""
    """``module:class``; imported only to run."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed."""
    extra: str = ""
    """The extra of Ridgeline that installs them."""
    expresses: Mapping[type[Technique], WhyNotExpressed] = field(default_factory=dict)
    """By supported technique: under which options."""
    model: Callable[[Experiment], str] = lambda e: ""
    """Why the experiment's model or workload is not supported, as :data:`WhyNotExpressed`."""
    refused: str = ""
    """Why it cannot be run at all."""
