"""Batches on their way to the device: the next one is prepared while a step runs, and its copies queue behind the step.

    host    | step i: launches … | waits for the loss of i - 1 | step i + 1: launches …
    thread  | batch i + 1: tokens, rows, pinned memory |
    device  | step i - 1 ……………………………………… | step i ………………………………… | copies of i + 1 | step i + 1 …

Checkpoints store nothing of it: batches follow from the step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.data.batches import IGNORE, Batch
from ridgeline.nn.model.flash_blocks import Sequences
from ridgeline.runtime.train_build import Micro


class Prepared(NamedTuple):
    """One rank's part of a global batch on the host, from where copies to the device do not hold it up."""

    rows: Batch
    size: int
    """Rows of a micro-batch."""
    valid: int
    """Tokens of the whole global batch that are learned."""
    ends: Tensor | None = None
    """Where the documents end in each micro-batch, for a GPU: one behind the other."""
    runs: tuple[tuple[int, int], ...] = ()
    """How many of ``ends`` each micro-batch has, and the tokens of its longest document."""


Sent = tuple[list[Micro], int]
"""Micro-batches on the device, and the valid tokens of the whole global batch."""


def pinned(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host where copies to ``device`` do not hold up the host."""
    return t.pin_memory() if device.type == "cuda" else t


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; the host does not wait for a GPU's copy."""
    return pinned(t, device).to(device, non_blocking=True)


def prepared(batch: Batch, mine: slice, size: int, device: torch.device) -> Prepared:
    """The rows ``mine`` of a global batch, for micro-batches of ``size`` rows."""
    valid = max(1, int((batch.labels != IGNORE).sum()))
    rows = Batch._make(None if t is None else pinned(t[mine], device) for t in batch)
    if rows.documents is None or device.type != "cuda":
        return Prepared(rows, size, valid)
    found = [Sequences.of_documents(d) for d in rows.documents.split(size)]
    ends = pinned(torch.cat([s.ends for s in found]), device)
    return Prepared(rows, size, valid, ends, tuple((len(s.ends), s.longest) for s in found))


def send(batch: Prepared, device: torch.device) -> Sent:
    """Begin to copy a batch to the device, and divide it there."""
    parts = [None if t is None else t.to(device, non_blocking=True).split(batch.size) for t in batch.rows]
    count = -(-len(batch.rows.ids) // batch.size)
    micros = [Micro._make((*(None if p is None else p[i] for p in parts), None)) for i in range(count)]
    if batch.ends is not None:
        ends = batch.ends.to(device, non_blocking=True).split([n for n, _ in batch.runs])
        runs = zip(micros, ends, batch.runs, strict=True)
        micros = [m._replace(sequences=Sequences(t, longest)) for m, t, (_, longest) in runs]
    return micros, batch.valid


class Loader:
    """This rank's batches by step. ``prepare(step)`` makes one on the host; with ``ahead``, in a thread, while the step
    before it runs. What it raises, :meth:`take` raises."""

    def __init__(self, prepare: Callable[[int], Prepared], device: torch.device, ahead: bool) -> None:
        self.prepare, self.device = prepare, device
        self._thread = ThreadPoolExecutor(1, "loader", _begin, (device,)) if ahead else None
        self._begun: tuple[int, Future[Prepared]] | None = None
        self._sent: tuple[int, Sent] | None = None

    def take(self, step: int, more: bool = False) -> Sent:
        """The batch of ``step`` on the device. ``more``: begin the next one, if that is done ahead."""
        held, self._sent = self._sent, None
        found = held[1] if held is not None and held[0] == step else send(self._found(step), self.device)
        if more and self._thread is not None:
            self._begun = step + 1, self._thread.submit(self.prepare, step + 1)
        return found

    def queue(self, step: int) -> None:
        """Copy ``step``, if it was begun, to the device behind what that has to do. What fails, :meth:`take` raises."""
        if self._begun is not None and self._begun[0] == step and self._begun[1].exception() is None:
            with suppress(RuntimeError):  # out of memory, too: the step before is not yet counted
                self._sent = step, send(self._begun[1].result(), self.device)
                self._begun = None

    def _found(self, step: int) -> Prepared:
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == step:
            return begun[1].result()
        if begun is not None:
            begun[1].exception()  # sources make one batch at a time
        return self.prepare(step)


def _begin(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # pinned memory belongs to the device of the thread
