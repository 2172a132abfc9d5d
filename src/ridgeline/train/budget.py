"""A limit on device memory: a fraction of a GPU's, or on a CPU live tensors as tracked by the meter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ridgeline.nn.memory.meter import Meter
from ridgeline.train.trainer import Trainer


class Budget:
    """At most ``limit`` bytes of device memory while a trainer steps; None: no limit.

    Host memory of the tiered store does not count. Raises ``torch.OutOfMemoryError`` where the limit is exceeded: at
    once, if what the trainer holds between steps already exceeds it.
    """

    def __init__(self, trainer: Trainer, limit: int | None) -> None:
        self.trainer = trainer
        self.meter: Meter | None = None
        device = trainer.device
        if limit is None:
            return
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            return
        self.meter = Meter(trainer.run.root, limit=limit)
        self.meter.register_states(trainer.optimizer)
        self.meter.require("what is held between steps")
        trainer.optimizer.register_step_pre_hook(lambda *_: self._updating(True))
        trainer.optimizer.register_step_post_hook(lambda *_: self._updating(False))

    def _updating(self, now: bool) -> None:
        assert self.meter is not None
        self.meter.updating = now

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step."""
        if self.meter is None:
            yield
            return
        with self.meter:
            yield

    @property
    def peak(self) -> int | None:
        """Most bytes of device memory so far; None: not tracked."""
        if self.trainer.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.trainer.device))
        return self.meter.peak.total if self.meter else None
