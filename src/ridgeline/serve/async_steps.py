"""Asynchronous scheduling (as vLLM's): a step is launched before the host knows the tokens of the one before.

Those tokens go from one step to the next on the device. While step n + 1 is on its way, the host waits for the tokens
of step n, ends outputs and reports; an output that they end has one row too many in step n + 1, whose token is dropped.
On a GPU steps are launched by the engine's own thread. On a CPU a thread computes them, in order, so that Python goes
on while kernels run without the interpreter lock.

A step goes ahead if none of its outputs needs the host to choose: grammars, penalties, bad words, log-probabilities,
ranked outputs, beams and embeddings do. Any other step begins when all tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.serve.next_tokens import NO_LOGITS
from ridgeline.serve.sampler import NOT_FINITE, Chosen, draws, give_back
from ridgeline.serve.scheduler import StepBatch
from ridgeline.serve.sequence import Sequence

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine


class DeviceQueue:
    """Calls that a device carries out one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "steps") if device.type == "cpu" else None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call: at once where it only launches what the device does, or else in the queue's thread."""
        if self._thread is not None:
            return self._thread.submit(call)
        done: Future[Any] = Future()
        try:
            done.set_result(call())
        except Exception as e:
            done.set_exception(e)
        return done

    def close(self) -> None:
        """Wait for the last call."""
        if self._thread is not None:
            self._thread.shutdown()


class _Part(NamedTuple):
    """The tokens of some rows on their way to the host."""

    chosen: Chosen
    host: Tensor
    there: Any
    """An event behind the copy; None: there is nothing to wait for."""


class _Found(NamedTuple):
    """What a step has chosen."""

    tokens: Tensor
    """int64 [R], on the device."""
    parts: list[_Part]


@dataclass
class _Step:
    """A step whose tokens the host does not know yet."""

    before: list[tuple[Sequence, int]] = field(default_factory=list)
    """Its sequences, and how many of their tokens were computed before it."""
    ready: list[Sequence] = field(default_factory=list)
    """Those that choose a token."""
    rows: list[int] = field(default_factory=list)
    """The rows that these follow from."""
    uniform: list[float] = field(default_factory=list)
    """Their random numbers."""
    short: list[bool] = field(default_factory=list)
    """Which of them have fewer than ``min_tokens`` before it."""
    forks: list[Sequence] = field(default_factory=list)
    """Those of them that it has made."""
    copies: bool = False
    """Whether it copies blocks first."""
    dropped: set[Sequence] = field(default_factory=set)
    """Those that were computed from another token than the step before has chosen in the end."""
    found: Future[_Found] = field(default_factory=Future)

    def read(self) -> tuple[list[int], set[int]]:
        """Wait for the tokens → them, and the places of those that differ from what the next step was given. Raises
        what went wrong."""
        tokens: list[int] = []
        others: set[int] = set()
        for chosen, host, there in self.found.result().parts:
            if there is not None:
                there.synchronize()
            some, changed = chosen.read(host.tolist())
            others |= {len(tokens) + i for i in changed}
            tokens += some
        return tokens, others


class AsyncSteps:
    """The steps of an engine that goes ahead."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.queue = engine, DeviceQueue(engine.runner.device)
        self.flying: _Step | None = None
        """The step that was launched last, if its tokens are not known yet."""
        self.suspects: set[Sequence] = set()
        """Those of steps that have failed: they are computed again, and not ahead."""

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step goes ahead."""
        return all(_plain(seq) and seq not in self.suspects for seq in batch.tokens)

    def step(self, batch: StepBatch) -> None:
        """Launch a step, then take in the tokens of the one before."""
        newer = self._launch(batch) if batch.tokens else None
        self.flying = newer if self._land(newer) else None

    def settle(self, batch: StepBatch | None = None) -> None:
        """Take in all tokens, before ``batch`` is computed without going ahead: what has ended leaves it."""
        self._land(None)
        self.flying = None
        if batch is not None:
            batch.tokens = {seq: n for seq, n in batch.tokens.items() if seq.finish is None}
            self.suspects = {s for s in self.suspects if s.finish is None and s not in batch.tokens}

    def close(self) -> None:
        """End the thread, after what it does."""
        self.queue.close()

    # ---- launching ---------------------------------------------------------------------------------------------------

    def _launch(self, batch: StepBatch) -> _Step:
        engine, before = self.engine, self.flying
        items = engine.order(batch)
        step = engine.runner.describe(items, batch.copies)
        if step.late:
            assert before is not None
            place = {seq: i for i, seq in enumerate(before.ready)}
            step.sources = [place[seq] for seq, _ in items if seq.pending]
        arranged = engine.runner.arrange(step) if self._arranges(step) else None
        new, row = _Step(copies=bool(batch.copies)), 0
        for seq, n in items:
            row += n
            self._advance(new, seq, n, row - 1)
        new.uniform = draws(new.ready)
        counts = engine.runner.rows(items)

        @torch.inference_mode()
        def compute() -> _Found:
            if step.late and before is not None:
                step.tokens = before.found.result().tokens
            if engine.adapters is not None:
                engine.adapters.activate(items, counts)
            hidden = engine.runner.execute(step, arranged)
            return self._choose(new, hidden)

        new.found = self.queue.submit(compute)
        return new

    def _arranges(self, step: Any) -> bool:
        """Whether a step's numbers have to be put on the device before: a captured step brings its own."""
        graphs = self.engine.runner.graphs
        return graphs is None or graphs.find(step) is None

    def _advance(self, new: _Step, seq: Sequence, n: int, row: int) -> None:
        """Count ``n`` tokens of a sequence as computed by a step; the last one is its ``row``."""
        late, known = seq.pending, len(seq.tokens) + seq.pending
        new.before.append((seq, seq.n_computed))
        self.engine.count(seq, n)
        seq.n_computed, seq.pending = seq.n_computed + n, 0
        if seq.n_computed < known:
            return
        for one in [seq] if late else self.engine.next_tokens.forked(seq):
            if one is not seq:
                new.forks.append(one)
            new.ready.append(one)
            new.rows.append(row)
            new.short.append(one.generated + late < one.group.request.sampling.min_tokens)
            one.pending = int(one.generated + late + 1 < one.group.request.sampling.max_tokens)

    def _choose(self, new: _Step, hidden: Tensor) -> _Found:
        """Choose the tokens of a step, and begin to copy them to the host."""
        engine, parts = self.engine, []
        for at in range(0, len(new.rows), engine.rows_at_once):
            some = slice(at, at + engine.rows_at_once)
            logits = engine.next_tokens.logits(new.rows[some], hidden)
            if hidden.device.type == "cpu" and not torch.isfinite(logits.amax(1)).all():
                raise ValueError(NO_LOGITS)  # a GPU's sampler looks at its rows itself
            chosen = engine.sampler.launch(logits, new.ready[some], new.uniform[some], new.short[some])
            host, there = chosen.numbers.to("cpu", non_blocking=True), None
            if hidden.device.type == "cuda":
                there = torch.cuda.Event()
                there.record()
            parts.append(_Part(chosen, host, there))
        tokens = [p.chosen.numbers[: p.chosen.rows] for p in parts]
        return _Found(torch.cat(tokens) if len(tokens) > 1 else tokens[0] if tokens else hidden.new_empty(0), parts)

    # ---- landing -----------------------------------------------------------------------------------------------------

    def _land(self, newer: _Step | None) -> bool:
        """Take in the tokens of the step that flies; ``newer`` was launched behind it → whether that still counts."""
        step = self.flying
        if step is None:
            return True
        try:
            tokens, others = step.read()
        except Exception:
            if newer is not None:
                wait_for([newer.found])
            self._undo([step] if newer is None else [step, newer])
            return False
        ahead = {} if newer is None else {seq: i for i, seq in enumerate(newer.ready)}
        ready = set(step.ready)
        for seq, _ in step.before:
            if seq not in ready and seq.finish is None:
                self.engine.blocks.commit(seq)
        for i, (seq, token) in enumerate(zip(step.ready, tokens, strict=True)):
            if seq.finish is not None or seq in step.dropped:
                continue
            if seq not in ahead:
                seq.pending = 0
            elif i in others and newer is not None:
                newer.dropped.add(seq)
                give_back([seq], [newer.uniform[ahead[seq]]])
                seq.n_computed, seq.pending = seq.n_computed - 1, 0
            self._take(seq, token)
        return True

    def _take(self, seq: Sequence, token: int) -> None:
        """Append and report a token."""
        engine = self.engine
        if token == NOT_FINITE:
            engine.outputs.fail(seq, NO_LOGITS)
            return
        engine.next_tokens.append(seq, token, None)
        engine.blocks.commit(seq)
        engine.outputs.emit(seq)
        if seq.finish is not None:
            engine.outputs.end(seq)

    def _undo(self, steps: list[_Step]) -> None:
        """Forget steps, the oldest first, that have failed: what was theirs is computed again, as it would have been
        without going ahead, so that only what is at fault fails."""
        for step in reversed(steps):
            some = [i for i, seq in enumerate(step.ready) if seq not in step.dropped]
            give_back([step.ready[i] for i in some], [step.uniform[i] for i in some])
            for fork in step.forks:  # which are made again
                if fork.finish is None:
                    fork.finish = "abort"
                    fork.group.sequences.remove(fork)
                    self.engine.scheduler.remove(fork)
            for seq, before in step.before:
                seq.pending, seq.n_computed = 0, min(seq.n_computed, before)
            if step.copies:  # which may not have been made
                lacking = [seq for seq, _ in step.before if seq in self.engine.scheduler.running]
                for seq in lacking:
                    self.engine.scheduler.compute_again(seq)
        self.suspects |= {seq for step in steps for seq, _ in step.before if seq.finish is None}
        self.engine.blocks.reset()  # it may have blocks that were not computed


def _plain(seq: Sequence) -> bool:
    """Whether a sequence's next token can be chosen without the host knowing the one before."""
    group = seq.group
    if group.plain is None:
        r, s = group.request, group.request.sampling
        penalties = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty or s.bad_words
        reports = s.logprobs is not None or s.prompt_logprobs is not None or s.ranked
        group.plain = not (r.embed or penalties or reports or s.grammar or r.watch or group.beams)
    return group.plain and not seq.draft
