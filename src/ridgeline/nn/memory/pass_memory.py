"""Memory of a forward pass over T tokens, for any T: offsets for its results from two recorded passes.

The operators of a pass outside attention do not depend on the batch, and every size is constant or grows linearly with
T. So two recorded passes of different T give the sizes and lifetimes for all (TurboTransformers, arXiv:2010.05680,
takes them from the graph), and a planner places the results for any T before the pass runs. Where operators do differ
with T (kernels for few rows), that T is recorded separately. Attention allocates as usual: its operators depend on the
batch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.nn.memory.arena import Span, padded, signature, writer_of
from ridgeline.nn.memory.kv_pool import BatchLayout
from ridgeline.nn.memory.meter import tensors_in

Forward = Callable[[Tensor, Tensor], Tensor]
"""Token ids [1, T] and their positions [T] → hidden states [T, H]."""
Regions = dict[int, int]
"""Memory regions: bytes by number."""
Planner = Callable[[Sequence[Span], Mapping[int, int]], tuple[list[tuple[int, int]], Regions]]
"""Lifetimes and the existing regions → (region, offset) of each, and the required regions."""
PLANS = 256
"""Maximum number of cached plans."""


def _linear(out: Tensor, args: Sequence[Any], kwargs: Any) -> Tensor:
    x, weight, bias = args[0].flatten(0, -2), args[1].t(), args[2] if len(args) > 2 else None
    into = out.view(-1, out.shape[-1])
    _ = torch.mm(x, weight, out=into) if bias is None else torch.addmm(bias, x, weight, out=into)
    return out


def _embedding(out: Tensor, args: Sequence[Any], kwargs: Any) -> Tensor:
    torch.index_select(args[0], 0, args[1].flatten(), out=out.view(-1, out.shape[-1]))
    return out


def _copy(out: Tensor, args: Sequence[Any], kwargs: Any) -> Tensor:
    out.view(args[0].shape).copy_(args[0])
    return out


_aten = torch.ops.aten
_COMPOSITES: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _linear, _aten.embedding.default: _embedding, _aten.reshape.default: _copy,
    _aten.to.dtype: _copy,
}  # fmt: skip
"""Operators that are not decomposed in inference, and how to run them into a given tensor."""


class _Mode(TorchDispatchMode):
    """Counts the operators outside attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = self.run(func, args, kwargs or {})
        self.now += 1
        return out

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Operator ``now``."""
        raise NotImplementedError


@dataclass
class _Pause:
    """Entered by attention: operators in it are ignored."""

    mode: _Mode | None = None
    """What a pass runs in."""

    def __enter__(self) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        if self.mode is not None:
            self.mode.__enter__()  # type: ignore[no-untyped-call]


@dataclass
class _Output:
    """A result that can be placed."""

    op: int
    size: tuple[int, ...]
    dtype: torch.dtype
    death: int | None = None
    """Operator before which it was freed; None: it outlives the pass."""


class _Record(_Mode):
    """Records operators, and the lifetimes of results that have a storage of their own and could be placed."""

    def __init__(self, writer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.writer = writer
        self.signatures: list[tuple[Any, ...]] = []
        self.outputs: list[_Output] = []
        self.storages = 0
        """Storages that the pass allocated, outside attention."""
        self._watched: list[Any] = []

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run operator ``now`` as usual."""
        self.signatures.append(signature(func, args, kwargs))
        given = {t.untyped_storage()._cdata for t in tensors_in(args, kwargs)}
        out = func(*args, **kwargs)
        if type(out) is not Tensor or out.untyped_storage()._cdata in given:
            return out
        self.storages += 1
        whole = out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * out.itemsize > 0
        if whole and self.writer(func) is not None:
            output = _Output(self.now, tuple(out.shape), out.dtype)

            def gone(_: object, output: _Output = output) -> None:
                output.death = self.now

            self.outputs.append(output)
            self._watched.append(weakref.ref(out.untyped_storage(), gone))
        return out

    def close(self) -> None:
        """Called when the pass has ended, while its result is still alive."""
        self.outputs = [m for m in self.outputs if m.death is not None]
        self._watched.clear()


class _Place(_Mode):
    """Runs operators into their places, as long as they match the recording."""

    def __init__(self, plan: _Plan, writer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.plan, self.writer = plan, writer
        self.diverged = False
        self.placed = 0

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run operator ``now``, into its place if it has one."""
        expected = self.plan.signatures
        if not self.diverged and (self.now >= len(expected) or expected[self.now][0] is not func):
            self.diverged = True
        place = None if self.diverged else self.plan.views.get(self.now)
        if place is not None and expected[self.now] != signature(func, args, kwargs):
            place, self.diverged = None, True
        if place is None:
            return func(*args, **kwargs)
        self.placed += 1
        return self.writer(func)(place, args, kwargs)


@dataclass
class _Plan:
    """Offsets of the results of a pass over a certain number of tokens."""

    signatures: list[tuple[Any, ...]]
    views: dict[int, Tensor]
    """By operator."""
    regions: frozenset[int]
    naive: int
    """Bytes of all results together."""


class _Kind:
    """Passes with the same operators: from one recorded number of tokens, or generalized from two."""

    def __init__(self, tokens: int, record: _Record) -> None:
        self.tokens, self.record = tokens, record
        self.other: tuple[int, _Record] | None = None

    @property
    def general(self) -> bool:
        """Whether it holds for any number of tokens."""
        return self.other is not None

    def takes(self, tokens: int, record: _Record) -> bool:
        """Whether a recorded pass is of this kind; may generalize the kind."""
        if not self.general and tokens != self.tokens and len(record.outputs) == len(self.record.outputs):
            self.other = tokens, record
        try:
            signatures, outputs = self.at(tokens)
        except ValueError:
            signatures, outputs = [], []
        if signatures == record.signatures and outputs == record.outputs:
            return True
        if self.other is not None and self.other[1] is record:
            self.other = None
        return False

    def at(self, tokens: int) -> tuple[list[tuple[Any, ...]], list[_Output]]:
        """Signatures and results of a pass over ``tokens``. Raises :class:`ValueError` if sizes are not linear."""
        mine = self.record
        first, (second, theirs) = self.tokens, self.other or (self.tokens, self.record)

        def line(a: Any, b: Any) -> Any:
            if a == b:
                return a
            if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
                return tuple(map(line, a, b))
            if type(a) is not int or type(b) is not int or (b - a) % (second - first):
                raise ValueError(f"{a} and {b}")
            return a + (b - a) // (second - first) * (tokens - first)

        pairs = zip(mine.signatures, theirs.signatures, strict=True)
        signatures = [(s[0] if s[0] is t[0] else None, line(s[1], t[1])) for s, t in pairs]
        outputs = [_Output(m.op, line(m.size, t.size), m.dtype, m.death) for m, t in
                zip(mine.outputs, theirs.outputs, strict=True)]  # fmt: skip
        return signatures, outputs


@dataclass
class PassMemory:
    """Runs forward passes with their results in regions planned by ``planner``."""

    forward: Forward
    planner: Planner
    device: torch.device
    pause: _Pause = field(default_factory=_Pause)
    keep: int | None = None
    """Number of passes without use after which a region is freed; None: never."""
    memory: dict[int, Tensor] = field(default_factory=dict)
    plans: dict[int, _Plan] = field(default_factory=dict)
    unused: dict[int, int] = field(default_factory=dict)
    """Passes since each region was last used."""
    passes: int = 0
    allocations: int = 0
    """Regions allocated so far."""
    last: _Mode | None = None
    """The regions used by the last pass."""

    def __post_init__(self) -> None:
        self.kinds: list[_Kind] = []
        self.kind: dict[int, _Kind | None] = {}
        """The kind for each number of tokens seen so far; None: it is to be recorded."""
        self._writers: dict[Any, Callable[..., Any] | None] = {}

    def __call__(self, ids: Tensor, at: Tensor) -> Tensor:
        """One pass."""
        tokens = ids.shape[-1]
        self.passes += 1
        if tokens not in self.kind:
            known = [k for k in self.kinds if k.general]
            self.kind[tokens] = min(known, key=lambda k: abs(k.tokens - tokens)) if known else None
        kind = self.kind[tokens]
        if kind is None:
            return self._recorded(tokens, ids, at)
        plan = self.plans.get(tokens) or self._plan(tokens, kind)
        self._count(plan)
        mode = _Place(plan, self._writer)
        out = self._run(mode, ids, at)
        if mode.diverged:
            self.kind[tokens] = None
            self.plans.pop(tokens, None)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(t.nbytes for t in self.memory.values())

    def _writer(self, func: Any) -> Callable[..., Any] | None:
        if func not in self._writers:
            self._writers[func] = _COMPOSITES.get(func) or writer_of(func, self.device.type.upper())
        return self._writers[func]

    def _run(self, mode: _Mode, ids: Tensor, at: Tensor) -> Tensor:
        self.last = self.pause.mode = mode
        try:
            with mode:
                return self.forward(ids, at)
        finally:
            self.pause.mode = None

    def _recorded(self, tokens: int, ids: Tensor, at: Tensor) -> Tensor:
        record = _Record(self._writer)
        out = self._run(record, ids, at)
        record.close()
        kind = next((k for k in self.kinds if k.takes(tokens, record)), None)
        if kind is None:
            kind = _Kind(tokens, record)
            self.kinds.append(kind)
        self.kind[tokens] = kind
        return out

    def _plan(self, tokens: int, kind: _Kind) -> _Plan:
        signatures, outputs = kind.at(tokens)
        spans: list[Span] = []
        for m in outputs:
            spans.append((math.prod(m.size) * m.dtype.itemsize, m.op, max(m.op + 1, m.death or 0)))
        places, wanted = self.planner(spans, {i: t.nbytes for i, t in self.memory.items()})
        for i, size in wanted.items():
            if i in self.memory and self.memory[i].nbytes != size:
                self.plans.clear()  # whose views refer to the old memory
            if i not in self.memory or self.memory[i].nbytes != size:
                self.memory[i] = torch.zeros(size, dtype=torch.uint8, device=self.device)
                self.allocations += 1
        views = {}
        for m, (region, offset), (nbytes, _, _) in zip(outputs, places, spans, strict=True):
            views[m.op] = self.memory[region][offset : offset + nbytes].view(m.dtype).view(m.size)
        plan = _Plan(signatures, views, frozenset(r for r, _ in places), sum(padded(s[0]) for s in spans))
        if len(self.plans) >= PLANS:
            self.plans.pop(next(iter(self.plans)))
        self.plans[tokens] = plan
        return plan

    def _count(self, plan: _Plan) -> None:
        for i in list(self.memory):
            self.unused[i] = 0 if i in plan.regions else self.unused.get(i, 0) + 1
            if self.keep is not None and self.unused[i] > self.keep:
                del self.memory[i], self.unused[i]
                self.plans = {t: p for t, p in self.plans.items() if i not in p.regions}


def around(planner: Planner, keep: int | None = None) -> Callable[[Forward, BatchLayout, torch.device], Forward]:
    """Returns a function that applies a planner's memory to an engine's forward passes."""

    def put(forward: Forward, layout: BatchLayout, device: torch.device) -> Forward:
        layout.outside = pause = _Pause()
        return PassMemory(forward, planner, device, pause, keep)

    return put
