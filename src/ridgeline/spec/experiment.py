"""Experiment = model × cluster × workload × plan: what can be predicted, run and measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ridgeline.spec.device import Cluster
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import TRAINING_TASKS, Training, Workload

if TYPE_CHECKING:
    from typing_extensions import Self


def id_of(canonical: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of an experiment's canonical form."""
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Experiment(BaseModel):
    """One question: this model on this cluster, doing this work, under this plan.

    ``plan`` is normalized by the technique registry (every option filled in), so that :attr:`id` is canonical.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    plan: Plan = Plan()
    name: str = ""
    """A label; not part of the identity."""
    parallel: dict[str, int] = {}
    """Degrees of the model-parallel axes that the plan's techniques take (``{"tp": 8}``); the rest is data parallel."""

    @property
    def task(self) -> str:
        """pretrain, finetune, compress, generate or serve."""
        return self.workload.kind

    @property
    def is_training(self) -> bool:
        """Whether the task runs optimizer steps."""
        return self.task in TRAINING_TASKS

    @property
    def world(self) -> int:
        """Number of ranks (devices)."""
        return self.cluster.size

    @property
    def data_parallel(self) -> int:
        """Ranks left for data parallelism after the model-parallel axes."""
        return max(1, self.world // math.prod(self.parallel.values()))

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are summed: those with other sequences, and those with other parts of them."""
        return self.data_parallel * self.parallel.get("cp", 1)

    def stride(self, axis: str) -> int:
        """Distance, in ranks, between neighbors along a mesh axis; inside out: tp, cp, dp (with ep), pp."""
        inside = {"tp": [], "cp": ["tp"]}.get(axis, ["tp", "cp"])
        n = math.prod(self.parallel.get(name, 1) for name in inside)
        return n * self.data_parallel * self.parallel.get("ep", 1) if axis == "pp" else n

    @property
    def training(self) -> Training:
        """The workload as a training workload. Only for training tasks."""
        assert isinstance(self.workload, Training)
        return self.workload

    @property
    def batch_size(self) -> int:
        """Sequences per step over all ranks."""
        size: int | None = getattr(self.workload, "batch_size", None)
        return size if size is not None else self.data_parallel

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank in one forward pass."""
        if self.is_training and self.training.micro_batch_size is not None:
            return self.training.micro_batch_size
        return -(-self.batch_size // self.data_parallel)

    @property
    def accumulation(self) -> int:
        """Forward/backward passes per optimizer step on one rank."""
        return max(1, self.batch_size // (self.data_parallel * self.micro_batch_size))

    @property
    def dtype(self) -> str:
        """Storage dtype of the weights: as the workload says, or fp32 in training and on CPUs, else bf16."""
        if self.workload.dtype != "auto":
            return self.workload.dtype
        return "fp32" if self.is_training or self.cluster.device.kind == "cpu" else "bf16"

    def canonical(self) -> dict[str, Any]:
        """The identity as plain data: everything but labels, and of the device only its name."""
        return {
            "model": self.model.model_dump(exclude={"source", "published_parameters"}),
            "cluster": self.cluster.label,
            "workload": self.workload.model_dump(),
            "plan": sorted(self.plan.strings()),
        }

    @cached_property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical form."""
        return id_of(self.canonical())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values in some fields; its :attr:`id` is its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("id", None)  # pydantic copies cached properties, too
        return copied
