"""What the host learns of a training step. A GPU's numbers arrive while the next step runs, so that it never idles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.train.loader import to_device


class Report(NamedTuple):
    """What the host reads of a step, the same on every rank."""

    loss: float
    """Over all ranks."""
    norm: float
    """Of the gradients, before clipping."""
    stop: bool
    """Whether any rank received a stop signal."""
    finished: bool
    """Whether rank 0 considers training done."""


@dataclass(frozen=True)
class Sent:
    """A report on its way to the host."""

    numbers: Tensor
    """On the host: loss and norm; on several ranks, how many of them have each flag as well."""
    flags: tuple[bool, bool]
    """``stop`` and ``finished`` of this rank."""
    arrived: torch.cuda.Event | None
    """Recorded behind the copy from a GPU, before which ``numbers`` are not there."""

    def read(self) -> Report:
        """The report. The host waits for the step, and for nothing that was launched after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, *ranks = self.numbers.tolist()
        stop, finished = (n > 0 for n in ranks) if ranks else self.flags
        return Report(loss, norm, stop, finished)


def send(loss: Tensor, norm: Tensor, flags: tuple[bool, bool], world: int) -> Sent:
    """Begin to bring a step's report to the host, which does not wait. ``loss``: this rank's part of the mean, a
    scalar; ``norm``: of the gradients, the same on every rank."""
    part, size = loss.double().view(1), norm.to(loss.device, torch.float64).view(1)
    if world > 1:
        shared = torch.cat([part, to_device(torch.tensor(flags, dtype=torch.float64), loss.device)])
        dist.all_reduce(shared)
        numbers = torch.cat([shared[:1], size, shared[1:]])
    else:
        numbers = torch.cat([part, size])
    if numbers.device.type != "cuda":
        return Sent(numbers, flags, None)
    host, arrived = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))
    return Sent(host, flags, arrived)
