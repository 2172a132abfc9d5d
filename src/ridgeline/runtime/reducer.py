"""Gradient buckets that are all-reduced over the data-parallel ranks while the backward pass is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ridgeline.graph.traffic import buckets
from ridgeline.nn.parallel.collectives import local


class Waitable(Protocol):
    """A collective in progress."""

    def wait(self) -> object:
        """Block until the result is available."""


@dataclass
class Bucket:
    """Gradients that are reduced together, as views of one flat buffer."""

    parameters: list[nn.Parameter]
    flat: Tensor
    group: dist.ProcessGroup
    waiting: int = 0
    """Parameters whose last gradient is not yet available."""
    work: Waitable | None = None


@dataclass
class Reducer:
    """Sums gradients over ranks, for whole and for divided parameters, with or without autograd hooks.

    Buckets are sent in one fixed order, so that the collectives of all ranks match even where a rank's backward does
    not reach a parameter (an expert without tokens): the remaining ones are sent by :meth:`finish`.
    """

    buckets: list[Bucket]
    overlap: bool = True
    send: Callable[[Bucket], Waitable] | None = None
    """How a bucket is summed; None: by one all-reduce of its buffer."""
    armed: bool = False
    """Whether the current backward pass is the step's last."""
    sent: int = 0
    _of: dict[nn.Parameter, Bucket] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        parameters: list[nn.Parameter],
        group: Callable[[nn.Parameter], dist.ProcessGroup],
        bucket_bytes: float,
        overlap: bool,
        send: Callable[[Bucket], Waitable] | None = None,
    ) -> Reducer:
        """``parameters`` in forward order; ``group``: the ranks over which each is summed."""
        found = []
        for indices in buckets([(id(group(p)), local(p).numel() * 4) for p in reversed(parameters)], bucket_bytes):
            mine = [parameters[len(parameters) - 1 - i] for i in indices]
            size = sum(local(p).numel() for p in mine)
            dtype = getattr(mine[0], "grad_dtype", None) or mine[0].dtype  # fp32 sums of 16-bit weights
            flat = torch.zeros(size, dtype=dtype, device=local(mine[0]).device)
            found.append(Bucket(mine, flat, group(mine[0])))
        self = cls(found, overlap, send)
        for b in found:
            for p in b.parameters:
                self._of[p] = b
                p.register_post_accumulate_grad_hook(self._ready)
        return self

    def _attach(self) -> None:
        """Make gradients views of their buckets."""
        for b in self.buckets:
            parts = b.flat.split([local(p).numel() for p in b.parameters])
            for p, part in zip(b.parameters, parts, strict=True):
                view = part.view_as(local(p))
                if isinstance(p, DTensor):
                    p.grad = DTensor.from_local(view, p.device_mesh, p.placements, run_check=False)
                else:
                    p.grad = view

    def _ready(self, p: Tensor) -> None:
        if not self.armed:
            return
        self._of[p].waiting -= 1  # type: ignore[index]
        while self.sent < len(self.buckets) and self.buckets[self.sent].waiting == 0:
            self._send()

    def _send(self) -> None:
        b = self.buckets[self.sent]
        b.work = self.send(b) if self.send else dist.all_reduce(b.flat, group=b.group, async_op=True)
        self.sent += 1

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Context of one micro-batch: in the last one, buckets are sent as soon as they are full."""
        self.armed = last and self.overlap
        if any(p.grad is None for p in self._of):  # at first, or after an optimizer's state was loaded
            self._attach()
        for b in self.buckets:
            b.waiting = len(b.parameters)
        yield
        self.armed = False

    def finish(self) -> None:
        """Send the remaining buckets, and wait for all."""
        while self.sent < len(self.buckets):
            self._send()
        for b in self.buckets:
            assert b.work is not None
            b.work.wait()
            b.work = None
        self.sent = 0
