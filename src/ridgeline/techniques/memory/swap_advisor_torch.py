"""Executes a swap plan: saved tensors move to host memory after their forward use and back before backward uses them.

The unit is a storage that autograd saves, numbered in the order in which a step first packs it. Step 1 copies every one
of them out and fetches it on demand, which needs the least memory; step 2 does the same and is recorded; from step 3 on
the plan runs. One thread per direction makes the copies (on CUDA each with a stream of its own), so that host
allocations are not counted as the device's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ridgeline.nn.memory.timeline import Recorder
from ridgeline.spec.errors import UserError
from ridgeline.spec.sizes import say_size
from ridgeline.techniques.memory.swap_plan import Gap, Problem, Simulated, SwapChoice, deadlines, genetic, simulate

LEAST_BYTES = 1024
"""Smaller storages are not swapped: the copy costs more than it saves."""
LEAST_IDLE = 2
"""Minimum number of operators for which a swapped storage must be idle."""


class _Mover:
    """Copies in one direction, in order, beside the operators."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="swap")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` after everything submitted to the device so far."""
        if self.stream is None:
            return self.pool.submit(work)
        ready = torch.cuda.current_stream(self.device).record_event()
        stream = self.stream

        def on_stream() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result = work()
                stream.synchronize()
            return result

        return self.pool.submit(on_stream)


@dataclass(eq=False)
class _Away:
    """One storage that is swapped: on the device, copied out, or copied back."""

    number: int
    nbytes: int
    there: Tensor | None = None
    """Its bytes on the device, until they have been copied."""
    out: Future[Tensor] | None = None
    """Its copy in host memory."""
    into: Future[None] | None = None
    here: Tensor | None = None
    """Its new bytes on the device, as long as saved tensors need them."""


@dataclass(eq=False)
class _View:
    """What autograd stores instead of a saved tensor."""

    home: _Away
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Seen:
    """What the recording shows about one storage."""

    nbytes: int
    before: Any
    """Its record on the device in the forward pass."""
    packed: int
    """Operator at which it was first packed."""
    after: Any = None
    """The record of the copy that backward used."""
    released: int = 0
    """Operator at which autograd released it."""


@dataclass
class Swapper:
    """Keeps a step within ``budget`` bytes of live device tensors: call it instead of ``execute``."""

    execute: Callable[..., Tensor]
    root: nn.Module
    device: torch.device
    budget: int
    optimizer: Callable[[], torch.optim.Optimizer | None]
    plan: SwapChoice | None = None
    problem: Problem | None = None
    simulated: Simulated | None = None
    copied: int = 0
    """Bytes moved in the last step, in both directions."""
    copies: int = 0
    """Copies made in the last step, in both directions."""
    steps: int = 0
    recorder: Recorder | None = None
    seen: dict[int, _Seen] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    """Storages of parameters."""
    homes: dict[int, _Away | None] = field(default_factory=dict)
    """Storages packed in this step; None: not swapped."""
    packed: int = 0
    """Storages packed so far in this step."""
    events: list[int] = field(default_factory=list)
    """Recorded operator of each pack and unpack."""
    at: int = 0
    """Events of this step so far."""

    def __post_init__(self) -> None:
        self.outward, self.inward = _Mover(self.device), _Mover(self.device)
        self.gap_of: dict[int, int] = {}
        self.free_by: dict[int, int] = {}
        self.due: list[tuple[int, int]] = []
        self.pending: list[_Away] = []
        self.gone: dict[int, _Away] = {}

    def __call__(self, *args: Any) -> Tensor:
        """Forward and backward of a step, with swapping around them."""
        self._begin()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            result = self._recorded(*args) if self.steps == 1 else self.execute(*args)
        self._end()
        return result

    # ---- one step -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.homes, self.gone, self.pending = {}, {}, []
        self.at = self.packed = self.copied = self.copies = 0
        self.due = []
        if self.plan is not None:
            self.due = sorted((self.plan.back[g], n) for n, g in self.gap_of.items())

    def _end(self) -> None:
        while self.pending:
            self._let_go()
        self.homes, self.gone = {}, {}
        self.steps += 1

    def _pack(self, t: Tensor) -> Any:
        if type(t) not in (Tensor, nn.Parameter) or t.device.type != self.device.type or t.layout != torch.strided:
            return t
        storage = t.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < LEAST_BYTES or key in self.fixed:
            return t
        if self.plan is None and any(p.untyped_storage()._cdata == key for p in self._parameters()):
            self.fixed.add(key)
            return t
        known = self._number(key, storage)
        self._event()
        if known is None:
            return t
        view = _View(known, t.dtype, t.shape, t.stride(), int(t.storage_offset()))
        if self.recorder is not None:
            weakref.finalize(view, self._released, self.seen[known.number], self.recorder)
        return view

    @staticmethod
    def _released(entry: _Seen, recorder: Recorder) -> None:
        entry.released = recorder.now

    def _parameters(self) -> list[Tensor]:
        return [p.to_local() if hasattr(p, "to_local") else p for p in self.root.parameters()]

    def _number(self, key: int, storage: Any) -> _Away | None:
        """The storage's number in this step, assigned at its first pack; starts its copy to the host if the plan swaps
        it."""
        if key in self.homes:
            return self.homes[key]
        number = self.packed
        self.packed += 1
        home: _Away | None = None
        if self.plan is None or number in self.gap_of:
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)  # all of it, as bytes
            home = _Away(number, storage.nbytes())
            if self.recorder is not None:
                self.seen[number] = _Seen(home.nbytes, self.recorder.entry(flat), self.recorder.now)
            self._send(home, flat)
        self.homes[key] = home
        weakref.finalize(storage, self.homes.pop, key, None)  # its address may then be used again
        return home

    def _send(self, home: _Away, flat: Tensor) -> None:
        pinned = self.device.type == "cuda"

        def out() -> Tensor:
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pinned)
            return host.copy_(flat, non_blocking=pinned)

        home.there, home.out = flat, self.outward.start(out)
        self.copied += home.nbytes
        self.copies += 1
        self.pending.append(home)
        if self.plan is None:
            self._let_go()
        else:
            self.gone[home.number] = home

    def _let_go(self) -> None:
        """Wait for the oldest copy out and free the device's bytes (in this thread, where memory is counted)."""
        home = self.pending.pop(0)
        if home.out is not None:
            home.out.result()
        home.there = None

    def _fetch(self, home: _Away) -> None:
        """Allocate device memory and start the copy back."""
        if home.here is not None or home.out is None:
            return
        host = home.out.result()
        here = home.here = torch.empty(home.nbytes, dtype=torch.uint8, device=self.device)

        def into() -> None:
            here.copy_(host, non_blocking=host.is_pinned())

        home.into = self.inward.start(into)
        self.copied += home.nbytes
        self.copies += 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            if packed.untyped_storage()._cdata in self.homes:
                self._event()
            return packed
        view: _View = packed
        home = view.home
        self._event()
        if home.here is None:
            self._fetch(home)
        assert home.here is not None
        assert home.into is not None
        home.into.result()
        if self.recorder is not None and self.seen[home.number].after is None:
            self.seen[home.number].after = self.recorder.entry(home.here)
        t = torch.empty(0, dtype=view.dtype, device=self.device)
        t.set_(home.here.untyped_storage(), view.offset, view.shape, view.stride)
        self.gone.pop(home.number, None)  # from here on only autograd holds it, for as long as it would have
        return t

    def _event(self) -> None:
        """Called at every pack and unpack: wait for copies that must have ended, start those that are due."""
        if self.recorder is not None:
            self.events.append(self.recorder.now)
        elif self.plan is not None and self.at < len(self.events):
            now = self.events[self.at]
            then = self.events[self.at + 1] if self.at + 1 < len(self.events) else now + 1
            while self.pending and self._must_go(self.pending[0], max(then, now + 1)):
                self._let_go()
            while self.due and self.due[0][0] <= now:
                number = self.due.pop(0)[1]
                if number in self.gone:
                    self._fetch(self.gone[number])
        self.at += 1

    def _must_go(self, home: _Away, then: int) -> bool:
        """Whether a copy out has ended, or must have ended before operator ``then``, at the next event."""
        done = home.out is None or home.out.done()
        return done or self.free_by.get(home.number, then) < then

    # ---- recording and planning ---------------------------------------------------------------------------------

    def _recorded(self, *args: Any) -> Tensor:
        recorder = self.recorder = Recorder(self.root)
        optimizer = self.optimizer()
        assert optimizer is not None
        recorder.register_states(optimizer)
        recorder.register((t for t in tree_iter(args) if isinstance(t, Tensor)), "activations")  # the batch
        with recorder:
            result = self.execute(*args)
        self.recorder = None
        self._plan(recorder)
        return result

    def _plan(self, recorder: Recorder) -> None:
        timeline = recorder.timeline()
        ops = len(timeline.operators)
        live = [0] * (ops + 1)
        for op, size in enumerate(timeline.live):
            live[op] = size
        gaps: list[Gap] = []
        for number, s in self.seen.items():
            if s.before is None or s.before.death is None:  # referenced elsewhere throughout
                continue
            last = max(s.packed, s.before.death - 1)
            again = s.after.born if s.after else s.released
            for op in range(last + 1, again):  # as if it had not been swapped
                live[op] += s.nbytes
            if s.after and again - last > LEAST_IDLE:
                self.gap_of[number] = len(gaps)
                gaps.append(Gap(s.nbytes, last, again))
        live.pop()
        problem = Problem(tuple(timeline.seconds), tuple(live), tuple(gaps), self.budget, self._bandwidth())
        if problem.least > self.budget:
            raise UserError(
                f"swap_advisor: the step does not fit into {say_size(self.budget)}: with every saved tensor in host"
                f" memory its peak is still {say_size(problem.least)}",
                "raise the budget, use a smaller micro_batch_size, or add recompute, flash_attention or zero",
            )
        choice = genetic(problem)
        self.problem, self.simulated = problem, simulate(problem, choice)
        self.gap_of = {n: g for n, g in self.gap_of.items() if choice.back[g]}
        limits = deadlines(problem, choice)
        self.free_by = {n: limits[g] for n, g in self.gap_of.items() if g in limits}
        self.plan = choice

    def _bandwidth(self) -> float:
        """Measured bandwidth of a 16 MB copy, bytes/s."""
        source = torch.ones(16_000_000, dtype=torch.uint8, device=self.device)
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            host.copy_(source)
            best = min(best, time.perf_counter() - start)
        return source.numel() / best
