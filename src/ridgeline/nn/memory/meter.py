"""The meter: live tensor bytes by category while a step runs, on any device, and the process's actual memory.

A dispatch mode sees every operator of forward, backward and update; each new storage is counted from when it is first
seen until Python and autograd release it. Storages that FSDP resizes in place are measured again at every operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.nn.memory.tiered_store import HOST, is_host, making_now
from ridgeline.nn.model.rotary import Rotary


def tensors_in(*nested: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, in order, in a fraction of the time of PyTorch's pytree."""
    found: list[torch.Tensor] = []
    for x in nested:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += tensors_in(*x)
        elif isinstance(x, dict):
            found += tensors_in(*x.values())
    return found


def _parts(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a tensor that have memory on this rank: its own shard, and for a sparse one its indices and
    values."""
    t = _local(t)
    return (t._indices(), t._values()) if t.layout is torch.sparse_coo else (t,)


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if type(t) not in _PLAIN and hasattr(t, "to_local") else t


_PLAIN = (torch.Tensor, nn.Parameter)
"""Types that are known to have memory of their own, without a look at their attributes."""


@dataclass
class Usage:
    """Live bytes of the device per category at the instant of peak, and where in the step that was."""

    categories: dict[str, int]
    instant: str
    host: int = 0
    """Peak of live bytes in the store's host memory, which is not the device's."""

    @property
    def total(self) -> int:
        """Peak of the sum over the device."""
        return sum(self.categories.values())


@dataclass
class _Entry:
    ref: weakref.ref[Any]
    category: str
    size: int


@dataclass
class Meter(TorchDispatchMode):
    """Use as a context manager around steps of ``model``.

    Categories: parameters (including gathered copies and those in the compute dtype), gradients, optimizer, buffers,
    activations (created in forward), temporaries (created in backward or in the update, including recomputed
    activations). Memory that the tiered store marked as host memory does not count as the device's: it is summed
    separately, even if the device is the CPU.

    With a ``limit`` in bytes, ``torch.OutOfMemoryError`` is raised when live bytes exceed it.
    """

    model: nn.Module
    updating: bool = False
    """Set while the optimizer runs."""
    live: dict[int, _Entry] = field(default_factory=dict)
    peak: Usage = field(default_factory=lambda: Usage({}, ""))
    total: int = 0
    """Live bytes of the device."""
    host: int = 0
    """Live bytes in the store's host memory."""
    limit: int | None = None
    """The device's memory; None: unlimited."""
    owned: list[nn.Parameter] = field(init=False)
    """The parameters between steps: FSDP replaces them by gathered ones while it computes."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owned = list(self.model.parameters())

    def register(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count existing tensors (parameters, gradients, optimizer states, buffers) under ``category``."""
        for t in tensors:
            self._see(_local(t), category)

    def register_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the model's parameters, buffers and existing gradients, and the optimizer's states."""
        self.register((p.data for p in self.model.parameters()), "parameters")
        self.register(self.model.buffers(), "buffers")
        tables = [r.cached() for m in self.model.modules() if isinstance(r := getattr(m, "rotary", None), Rotary)]
        self.register(chain.from_iterable(tables), "buffers")
        self.register((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        states = (v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        self.register(states, "optimizer")

    @property
    def phase(self) -> str:
        """forward, backward or optimizer: the current phase of the step."""
        if self.updating:
            return "optimizer"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _see(self, t: torch.Tensor, category: str) -> None:
        if t.is_meta:
            return
        storage = t.untyped_storage()
        key = storage._cdata
        entry = self.live.get(key)
        if entry is not None and entry.ref() is not None:
            if category == "parameters" and entry.category in ("temporaries", "activations"):
                entry.category = category  # gathered parameters are seen when they are used
            if entry.category != HOST and is_host(storage):  # marked after it was created
                self._add(entry.category, -entry.size)
                entry.category, entry.size = HOST, 0
            self._measure(entry, storage)  # it may have been resized in place since
            return
        if is_host(storage):
            category = HOST

        def gone(_: Any, key: int = key) -> None:
            dead = self.live.pop(key, None)
            if dead is not None:
                self._add(dead.category, -dead.size)

        self.live[key] = entry = _Entry(weakref.ref(storage, gone), category, 0)
        self._measure(entry, storage)

    def _add(self, category: str, size: int) -> None:
        if category == HOST:
            self.host += size
        else:
            self.total += size

    def _measure(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        now = storage.nbytes()
        if now != entry.size:
            self._add(entry.category, now - entry.size)
            entry.size = now

    def _resize(self) -> None:
        for entry in list(self.live.values()):
            storage = entry.ref()
            if storage is not None:
                self._measure(entry, storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        category = "activations" if self.phase == "forward" else "temporaries"
        for x in tensors_in(args):
            if type(x) is not torch.Tensor and isinstance(x, nn.Parameter):
                for part in _parts(x):
                    self._see(part, "parameters")
            else:
                for part in _parts(x):
                    storage = part.untyped_storage()
                    if storage._cdata in self.live or is_host(storage):
                        self._see(part, category)
        kind = making_now() or ("parameters" if self._casts_weight(func, args, out) else category)
        for x in tensors_in(out):
            for part in _parts(x):
                self._see(part, kind)
        if self.total > self.peak.total:
            self._record(str(func))
        if self.host > self.peak.host:
            self._resize()
            self.peak.host = max(self.peak.host, self.host)
        return out

    def _casts_weight(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Whether an operator creates a parameter's copy in the compute dtype (autocast keeps it for the step)."""
        if func is not torch.ops.aten._to_copy.default or out.element_size() >= args[0].element_size():
            return False
        entry = self.live.get(_local(args[0]).untyped_storage()._cdata)
        return entry is not None and entry.category == "parameters"

    def _record(self, where: str) -> None:
        self._resize()
        if self.total <= self.peak.total:
            return
        # A gradient was a temporary when it was created.
        for p in chain(self.owned, self.model.parameters()):
            if p.grad is not None:
                entry = self.live.get(_local(p.grad).untyped_storage()._cdata)
                if entry is not None:
                    entry.category = "gradients"
        sums: dict[str, int] = {}
        for entry in self.live.values():
            if entry.category != HOST and entry.size:
                sums[entry.category] = sums.get(entry.category, 0) + entry.size
        self.peak = Usage(sums, f"{self.phase}: {where}", self.peak.host)
        self._check(where)

    def require(self, where: str) -> None:
        """Raise ``torch.OutOfMemoryError`` if live bytes exceed the limit."""
        self._record(where)

    def _check(self, where: str) -> None:
        if self.limit is None or self.total <= self.limit:
            return
        held = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in sorted(self.peak.categories.items(), key=lambda i: -i[1]))
        raise torch.OutOfMemoryError(
            f"{self.total / 1e6:.1f} MB are needed ({self.phase}: {where}), the device memory is limited to"
            f" {self.limit / 1e6:.1f} MB: {held}; add zero_infinity, zero_offload, activation_offload or recompute, or"
            " use smaller micro-batches"
        )


def process_memory(pid: int | str = "self") -> dict[str, int]:
    """Actual memory of a process in bytes: resident, its anonymous part, and the peak (Linux; elsewhere empty)."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return {}
    wanted = {"VmRSS": "rss", "RssAnon": "rss_anonymous", "VmHWM": "rss_peak"}
    found: dict[str, int] = {}
    for line in status.read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in wanted:
            found[wanted[key]] = int(rest.split()[0]) * 1024
    return found


def return_freed_memory() -> None:
    """Return freed memory to the kernel (glibc; a no-op elsewhere)."""
    import ctypes

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
