"""A job: what its ranks do and with which options, in a form that can be sent to them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.spec.experiment import Experiment

if TYPE_CHECKING:
    import torch

Progress = Callable[[dict[str, Any]], None]
"""Receives one message of rank 0: the stage it is in, or the step it has finished."""


@dataclass(frozen=True)
class JobOptions:
    """Options of every job; each mode adds its own."""

    timeout: float | None = None
    """Seconds that a rank waits for the others in a collective; None: :data:`ridgeline.jobs.worker.TIMEOUT`."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """A training run: checkpoints, evaluation, export."""

    out: str | None = None
    """Directory of checkpoints; None: none are kept."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    async_save: bool = False
    """Write checkpoints while training goes on, but for the last one."""
    resume: bool = False
    """Continue from the newest checkpoint in ``out``."""
    export: str | None = None
    """Directory for the trained model, or with ``adapter`` for what was added to it."""
    adapter: bool = False
    adapter_from: str | None = None
    """Directory of an adapter to continue from."""
    eval_every: int = 0
    """Steps between evaluations; 0: none. With them, the model with the lowest held-out loss is exported."""
    memory: str | None = None
    """Directory in memory for the copies of a plan with copies of its state; the same path on every machine."""
    device_memory: int | None = None
    """Bytes that each rank's device may use."""
    backend: str = "native"


@dataclass(frozen=True, kw_only=True)
class CellOptions(JobOptions):
    """One measured cell."""

    repeat: int = 0
    """Number of this process among the plan's."""
    memory: bool = True
    """Record memory by category in one more step."""
    backend: str = "native"


@dataclass(frozen=True, kw_only=True)
class DissectOptions(JobOptions):
    """Steps under the profiler."""

    trace: str | None = None
    """Chrome trace file to write."""
    profiled: int = 3
    """Steps under the profiler."""


@dataclass(frozen=True, kw_only=True)
class CompressOptions(JobOptions):
    """Where a compressed checkpoint goes, and in what format."""

    out: str
    format: str | None = None
    """See :mod:`ridgeline.nn.checkpoint.formats`, or "dense", "gguf"; None: compressed-tensors, or our own where that
    cannot hold what the plan makes."""
    resume: bool = True


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(JobOptions):
    """A checkpoint and the held-out text to evaluate it on."""

    checkpoint: str
    text: str
    seq_len: int = 2048
    """Tokens per window."""
    windows: int = 128
    """Maximum number of windows."""
    against: str | None = None
    """A checkpoint to compare with, window by window."""
    prompt_len: int = 64
    output_len: int = 0
    """Tokens of the timed generation; 0: it is not timed."""
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(JobOptions):
    """How thoroughly this machine is measured."""

    quick: bool = False
    inference: bool = True
    """Also measure what generation and serving need."""
    serving: bool = False
    """Measure the serving engine and nothing else."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(JobOptions):
    """Sizes at which collectives and copies are timed."""

    sizes: list[int]
    """Bytes."""


MODES: dict[str, tuple[type[JobOptions], str]] = {
    "train": (TrainOptions, "ridgeline.train.training_loop:train"),
    "train_backend": (TrainOptions, "ridgeline.measure.backends.train_loop:train"),
    "measure": (CellOptions, "ridgeline.measure.cells.cell:measure_cell"),
    "dissect": (DissectOptions, "ridgeline.measure.dissect:dissect_cell"),
    "compress": (CompressOptions, "ridgeline.compress.driver:compress"),
    "eval": (EvaluateOptions, "ridgeline.measure.evaluation:evaluate"),
    "probe": (ProbeOptions, "ridgeline.measure.probing.probe_worker:probe_rank"),
    "sweep": (SweepOptions, "ridgeline.measure.probing.sweep_worker:sweep_rank"),
}
"""By mode: the options, and the function that each rank calls, imported there. It takes (experiment, options,
:class:`RankContext`) and returns the result as plain data."""


@dataclass(frozen=True)
class LaunchJob:
    """What the ranks do: a mode of :data:`MODES`, its experiment if it has one, and its options."""

    mode: str
    experiment: Experiment | None
    options: JobOptions
    ranks: int = 1

    def to_json(self) -> str:
        """For the file or message that each rank reads."""
        experiment = None if self.experiment is None else self.experiment.model_dump(mode="json")
        return json.dumps({"mode": self.mode, "experiment": experiment, "options": asdict(self.options),
                           "ranks": self.ranks})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> LaunchJob:
        """The inverse of :meth:`to_json`. Raises ``ValueError`` for an unknown mode."""
        data = json.loads(text)
        if data["mode"] not in MODES:
            raise ValueError(f"unknown mode {data['mode']!r}")
        options, _ = MODES[data["mode"]]
        e = Experiment.model_validate(data["experiment"]) if data["experiment"] else None
        return cls(data["mode"], e, options(**data["options"]), data["ranks"])


def train_job(e: Experiment, options: TrainOptions) -> LaunchJob:
    """Training on all of the experiment's ranks, by the backend that the options name."""
    return LaunchJob("train" if options.backend == "native" else "train_backend", e, options, e.world)


@dataclass(frozen=True)
class RankContext:
    """One rank of a running job: its device, its place among the ranks, and where its progress goes."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    report: Progress = lambda message: None
