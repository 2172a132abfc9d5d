"""Counts what a step actually sends: every collective and message, seen where PyTorch passes it to the backend."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.nn.memory.meter import tensors_in

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "alltoall",
    "send": "p2p",
}
_ARGUMENT = {"all_gather": 0, "reduce_scatter": 1, "alltoall": 1}
"""Which tensor argument is the full buffer: an all-gather's output, a reduce-scatter's input, what a rank sends."""


class Wire(TorchDispatchMode):
    """Context manager around steps; ``counts`` is (kind, ranks) → [calls, bytes]. Messages are counted where sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        if name.startswith("c10d."):
            self._count(name.split(".")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(name)
        if kind is None:
            if name not in ("recv_", "barrier", "monitored_barrier_"):
                self.unknown.add(name)
            return
        group = next((g for g in (_group(a) for a in args) if g is not None), None)
        ranks = group.size() if group is not None else 0
        if ranks < 2:
            return
        tensors = tensors_in(args)
        t = tensors[_ARGUMENT.get(kind, 0)]
        entry = self.counts[kind, ranks]
        entry[0] += 1
        entry[1] += t.numel() * t.element_size()


def _group(value: Any) -> ProcessGroup | None:
    if isinstance(value, ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None
