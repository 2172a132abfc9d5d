"""One arena for the tensors of a step: offsets from lifetimes, and the dispatch mode that places results there.

The planner is greedy by size with best fit: the largest tensor first, each into the smallest gap that is free
throughout its lifetime. LightSeq2 (arXiv:2110.05722) likewise allocates the largest memory of a step once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.nn.memory.meter import tensors_in
from ridgeline.nn.memory.timeline import Recorder

ALIGNMENT = 64
"""Alignment of offsets in bytes."""

Span = tuple[int, int, int]
"""(bytes, birth, death): needed at times ``birth <= t < death``."""


def padded(size: int) -> int:
    """Bytes that a tensor of ``size`` takes in the arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lower_bound(spans: Sequence[Span]) -> int:
    """Peak of live padded bytes: no arena is smaller."""
    change: dict[int, int] = {}
    for size, birth, death in spans:
        change[birth] = change.get(birth, 0) + padded(size)
        change[death] = change.get(death, 0) - padded(size)
    most = live = 0
    for at in sorted(change):
        live += change[at]
        most = max(most, live)
    return most


def offsets(spans: Sequence[Span]) -> tuple[list[int], int]:
    """(offset of each span, bytes of the arena): spans that live at the same time never overlap."""
    out = [0] * len(spans)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(spans)), key=lambda i: (-spans[i][0], spans[i][1])):
        size, birth, death = padded(spans[i][0]), spans[i][1], spans[i][2]
        beside = sorted(
            (out[j], out[j] + padded(spans[j][0])) for j in placed if spans[j][1] < death and birth < spans[j][2]
        )
        best, end = None, 0
        for start, stop in beside:
            hole = start - end
            if hole >= size and (best is None or hole < best[0]):
                best = hole, end
            end = max(end, stop)
        out[i] = best[1] if best else end
        total = max(total, out[i] + size)
        placed.append(i)
    return out, total


# ---- the real side ---------------------------------------------------------------------------------------------------

_FRESH = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
_ZEROED = {"aten::zeros_like", "aten::new_zeros", "aten::zeros"}
_COPIED = {"aten::clone", "aten::_to_copy"}


def writer_of(func: Any, device: str) -> Callable[..., Any] | None:
    """How to run ``func`` into a given tensor without an allocation of its own; None where it cannot.

    Only ``out=`` kernels of the backend itself count: the generated ones allocate a result and copy it.
    """
    name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    if name in _FRESH:
        return lambda out, args, kwargs: out
    if name in _ZEROED:
        return lambda out, args, kwargs: out.zero_()
    if name in _COPIED:
        return lambda out, args, kwargs: out.copy_(args[0])
    packet = func.overloadpacket
    named = [a.name for a in func._schema.arguments]
    for overload in packet.overloads():
        into = getattr(packet, overload)
        extra = [a for a in into._schema.arguments if a.is_out]
        if len(extra) != 1 or [a.name for a in into._schema.arguments if not a.is_out] != named:
            continue
        full = f"{into._schema.name}.{overload}"
        types = [(str(a.type)) for a in into._schema.arguments if not a.is_out]
        if types != [str(a.type) for a in func._schema.arguments]:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, device):
            key = extra[0].name
            return lambda out, args, kwargs: into(*args, **kwargs, **{key: out})
    return None


def signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must match the recording for an operator's offset to be valid: the operator, and the sizes, strides and
    dtypes of its inputs."""
    return func, (*map(_form, args), *((name, _form(a)) for name, a in kwargs.items()))


def _form(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.dtype, a.layout, tuple(a.shape), a.stride() if a.layout is torch.strided else None
    if isinstance(a, (list, tuple)):
        return tuple(map(_form, a))
    return a if isinstance(a, (int, torch.dtype, torch.layout, torch.memory_format)) else None


@dataclass(eq=False)
class _Result:
    """An operator's fresh result in the recorded step."""

    op: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    entry: Any
    nbytes: int


@dataclass
class _Watch(Recorder):
    """A recorder that also keeps the shapes of results that could be placed."""

    results: list[_Result] = field(default_factory=list)
    signatures: list[tuple[Any, ...]] = field(default_factory=list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        op = self.now
        self.signatures.append(signature(func, args, kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if type(out) is Tensor and out.device.type != "meta" and writer_of(func, out.device.type.upper()):
            entry = self.entry(out)
            whole = entry is not None and entry.born == op and out.storage_offset() == 0
            if whole and entry is not None and entry.size and not any(out is x for x in tensors_in(args)):
                self.results.append(_Result(op, out.size(), out.stride(), out.dtype, entry, entry.size))
        return out


@dataclass
class _Placed:
    """A result's place in the arena."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Arena(TorchDispatchMode):
    """Runs recorded operators into their places. A context manager around every step after the recorded one.

    From the first operator that differs from the recording, the rest of the step allocates as usual.
    """

    operators: list[tuple[Any, ...]]
    """Signatures of the recorded step's operators."""
    places: dict[int, _Placed]
    nbytes: int
    memory: Tensor
    """[nbytes] uint8, allocated once."""
    now: int = 0
    served: int = 0
    """Number of results placed since the last step began."""
    diverged: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.typed: dict[torch.dtype, Tensor] = {}
        self.writers: dict[Any, Callable[..., Any] | None] = {}

    def begin(self) -> None:
        """Start a new step."""
        self.now = self.served = 0
        self.diverged = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        op = self.now
        self.now += 1
        kwargs = kwargs or {}
        if not self.diverged and (op >= len(self.operators) or self.operators[op] != signature(func, args, kwargs)):
            self.diverged = True
        place = None if self.diverged else self.places.get(op)
        if place is None:
            return func(*args, **kwargs)
        if func not in self.writers:
            self.writers[func] = writer_of(func, self.memory.device.type.upper())
        write = self.writers[func]
        assert write is not None
        if place.dtype not in self.typed:
            self.typed[place.dtype] = self.memory.view(place.dtype)
        at = place.offset // place.dtype.itemsize
        out = torch.as_strided(self.typed[place.dtype], place.size, place.stride, at)
        self.served += 1
        return write(out, args, kwargs)


def plan_arena(watch: _Watch, device: torch.device) -> Arena:
    """The arena for a recorded step: every placeable result that is freed before its end."""
    found = [r for r in watch.results if r.entry.death is not None and r.entry.size == r.nbytes]
    spans = [(r.nbytes, r.op, max(r.entry.death, r.op + 1)) for r in found]
    where, total = offsets(spans)
    places = {r.op: _Placed(at, r.size, r.stride, r.dtype) for r, at in zip(found, where, strict=True)}
    memory = torch.zeros(padded(total), dtype=torch.uint8, device=device)  # touched, so that it is actually allocated
    return Arena(watch.signatures, places, total, memory)


@dataclass
class StaticArena:
    """Records the second step it is called for and runs the later ones in one arena, kept as a buffer of ``root``."""

    execute: Callable[..., Tensor]
    root: nn.Module
    device: torch.device
    steps: int = 0
    arena: Arena | None = None
    bound: int = 0
    """Peak of live planned bytes."""
    naive: int = 0
    """Sum of all planned tensors: the memory of a step without reuse."""

    def __call__(self, *args: Any) -> Tensor:
        """Forward and backward of one step."""
        self.steps += 1
        if self.steps == 1:  # optimizer states and lazily created tables are allocated
            return self.execute(*args)
        if self.arena is None:
            watch = _Watch(self.root)
            with watch:
                result = self.execute(*args)
            self.arena = plan_arena(watch, self.device)
            spans = [(r.nbytes, r.op, max(r.entry.death, r.op + 1)) for r in watch.results if r.entry.death]
            self.bound, self.naive = lower_bound(spans), sum(padded(s[0]) for s in spans)
            self.root.register_buffer("arena", self.arena.memory, persistent=False)
            return result
        self.arena.begin()
        with self.arena:
            return self.execute(*args)
