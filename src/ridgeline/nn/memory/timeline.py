"""The timeline: every tensor of one step with its lifetime, as recorded by a dispatch mode.

Time is counted in operators: after operator ``i``, the live storages are those with ``birth <= i < death``. Tensors
that existed before the first operator have birth 0, those that still exist after the last have death
``len(operators)``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ridgeline.nn.memory.meter import Meter, tensors_in
from ridgeline.nn.memory.tiered_store import HOST


@dataclass(slots=True, frozen=True)
class Lifetime:
    """One storage: bytes, category (as in the meter), the operators between which it lives, and those that access
    it."""

    bytes: int
    category: str
    birth: int
    death: int
    """First operator that no longer sees it."""
    uses: tuple[int, ...]
    """Operators that read or write it, in order, without the one that created it."""
    writes: tuple[int, ...] = ()
    """Those of ``uses`` that modify it in place."""


@dataclass(slots=True)
class Timeline:
    """Lifetimes in order of birth, and the operators with their seconds."""

    tensors: list[Lifetime]
    operators: list[str]
    seconds: list[float]

    @property
    def live(self) -> list[int]:
        """Live bytes at the end of each operator."""
        change = [0] * (len(self.operators) + 1)
        for t in self.tensors:
            change[t.birth] += t.bytes
            change[max(t.birth, t.death)] -= t.bytes
        out, total = [], 0
        for delta in change[:-1]:
            total += delta
            out.append(total)
        return out

    @property
    def peak(self) -> int:
        """Peak live bytes at the end of an operator."""
        return max(self.live, default=0)

    @property
    def keys(self) -> list[tuple[str, int, str]]:
        """What identifies each tensor from step to step: the operator that created it, its bytes, its category."""
        return [(self.operators[t.birth], t.bytes, t.category) for t in self.tensors]


@dataclass
class _Open:
    ref: weakref.ref[Any]
    born: int
    size: int
    category: str
    uses: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    death: int | None = None


@dataclass
class Recorder(Meter):
    """A meter that also records every storage's lifetime. Use as a context manager around one step."""

    open: dict[int, _Open] = field(default_factory=dict)
    closed: list[Lifetime] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    now: int = 0
    """The current operator, or the next one."""

    def _see(self, t: torch.Tensor, category: str) -> None:
        super()._see(t, category)
        if t.device.type == "meta":
            return
        storage = t.untyped_storage()
        key = storage._cdata
        entry = self.live.get(key)
        if key in self.open or entry is None or entry.category == HOST:  # what is not on the device
            return

        def gone(ref: weakref.ref[Any], key: int = key) -> None:
            mine = self.open.get(key)
            if mine is not None and mine.ref is ref:
                self._close(key)

        self.open[key] = _Open(weakref.ref(storage, gone), self.now, storage.nbytes(), entry.category)

    def _close(self, key: int) -> None:
        o = self.open.pop(key)
        o.death = death = max(self.now, o.born)
        if o.size:
            self.closed.append(Lifetime(o.size, o.category, o.born, death, tuple(o.uses), tuple(o.writes)))

    def _settle_sizes(self) -> None:
        """FSDP frees and refills storages in place: each filling is a lifetime of its own."""
        for key, o in list(self.open.items()):
            storage = o.ref()
            if storage is None:
                continue
            size = storage.nbytes()
            if size != o.size:
                self._close(key)
                self.open[key] = replace(o, born=self.now, size=size, uses=[], writes=[])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self._settle_sizes()
        self.operators.append(str(func))
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        for i, arg in enumerate(args):
            for x in tensors_in(arg):
                self._touch(x, i < len(written) and written[i])
        for x in tensors_in(kwargs):
            self._touch(x, False)
        start = time.perf_counter()
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        self.seconds.append(time.perf_counter() - start)
        self._settle_sizes()
        self.now += 1
        return out

    def _touch(self, x: torch.Tensor, writes: bool) -> None:
        inner = x.to_local() if hasattr(x, "to_local") else x
        if inner.device.type == "meta":
            return
        o = self.open.get(inner.untyped_storage()._cdata)
        if o is not None and (not o.uses or o.uses[-1] != self.now):
            o.uses.append(self.now)
            if writes:
                o.writes.append(self.now)

    def entry(self, t: torch.Tensor) -> _Open | None:
        """The record of a tensor's storage, which is still being updated; None if it was not seen."""
        return self.open.get(t.untyped_storage()._cdata)

    def mark_gradients(self) -> None:
        """Recategorize gradients, which were temporaries when created: call it between backward and update."""
        for p in self.owned:
            if p.grad is not None:
                grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                o = self.open.get(grad.untyped_storage()._cdata)
                if o is not None:
                    o.category = "gradients"

    def timeline(self) -> Timeline:
        """What was recorded so far; storages that are still alive end with the last operator."""
        alive = [
            Lifetime(o.size, o.category, o.born, self.now, tuple(o.uses), tuple(o.writes))
            for o in self.open.values()
            if o.size
        ]
        tensors = sorted(self.closed + alive, key=lambda t: (t.birth, t.death, t.bytes, t.category, t.uses))
        return Timeline(tensors, list(self.operators), list(self.seconds))


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_backward: Callable[[], object],
    update: Callable[[], object],
) -> Timeline:
    """The timeline of one step, given as its two halves. The optimizer's states should exist: not the first step."""
    recorder = Recorder(model)
    recorder.register_states(optimizer)
    with recorder:
        forward_backward()
        recorder.mark_gradients()
        recorder.updating = True
        update()
    return recorder.timeline()
