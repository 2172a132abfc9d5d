"""The engine: requests in, steps, events out. Synchronous and deterministic; no threads, no HTTP, no text.

A step asks the scheduler what to compute, runs one packed batch, and lets each sequence whose last known token was
computed choose the next one. Everything that ends, forks or fails does so between two steps.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.async_steps import AsyncSteps
from ridgeline.serve.beam import Beams
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.drafting import Drafting, draftable
from ridgeline.serve.likelihoods import OneCopy
from ridgeline.serve.next_tokens import NextTokens
from ridgeline.serve.outputs import Outputs
from ridgeline.serve.pooling import end_pooled, pool, prompt_logprobs
from ridgeline.serve.rank_channel import RankLost
from ridgeline.serve.ranks import RankedRunner
from ridgeline.serve.request import Busy, EngineRequest, Invalid, OutputEvent, Stats, check_served
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.scheduler import Scheduler, StepBatch
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.serve.transfer.exports import Exports
from ridgeline.serve.transfer.imports import Imports
from ridgeline.spec.scheduling import Limits

log = logging.getLogger("ridgeline.serve")

LOGITS = 1 << 24
"""Largest number of logits at a time: sampling takes a few times their 64 MB, and a request may have many outputs."""


class Engine:
    """One model serving many requests at once."""

    def __init__(
        self, runner: Runner, blocks: Blocks, sampler: Sampler, limits: Limits, max_model_len: int, seed: int = 0
    ) -> None:
        self.runner, self.blocks, self.sampler, self.limits = runner, blocks, sampler, limits
        self.model, self.spec = runner.model, runner.model.spec
        self.eos = sampler.ends
        self.max_model_len = max_model_len
        self.rows_at_once = max(1, LOGITS // self.spec.vocab_size)
        self.scheduler = Scheduler(blocks, limits, max_model_len, whole=not self.spec.causal)
        self.outputs = Outputs(self.scheduler)
        self.next_tokens = NextTokens(runner, sampler, self.scheduler, self.outputs, self.rows_at_once)
        self.adapters: AdapterTable | None = None
        self.role = ""
        """What a fleet's router prefers to use it for."""
        self.fingerprint: Callable[[], str] = str
        """What two servers must have in common to share caches."""
        self.imports: Imports | None = None
        """Prompts that other servers compute for this one."""
        self.exports: Exports | None = None
        """Prompts that this one computes for others."""
        self.drafter: Drafting | None = None
        self.ahead: AsyncSteps | None = None
        """Launches steps before the tokens of the last one are known, where that is wanted (:meth:`go_ahead`)."""
        self._random = random.Random(seed)
        self._prompt_tokens = self._steps = self._drafted = 0

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """The requests that have not ended, by id."""
        return self.outputs.groups

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises :class:`Invalid` for one that can never be served, :class:`Busy` for a full queue."""
        self.validate(request)
        waiting = self.scheduler.waiting
        tokens = sum(len(s.tokens) - s.n_computed for s in waiting)
        most, most_tokens = self.limits.max_waiting, self.limits.max_waiting_tokens
        full = most is not None and len(waiting) >= most
        if full or (waiting and most_tokens is not None and tokens + len(request.prompt) > most_tokens):
            raise Busy(f"{len(waiting)} requests with {tokens} tokens are waiting already", retry_after=1.0)
        s = request.sampling
        seed = s.seed if s.seed is not None else self._random.getrandbits(64)
        group = SequenceGroup(request, seed, scope=request.salt)
        if self.adapters is not None:
            group.scope = self.adapters.scope(request.adapter) + b"\0" + request.salt
        if s.beam_width:
            ends = frozenset() if s.ignore_eos else self.eos | set(s.stop_token_ids)
            group.beams = Beams(s.beam_width, s.length_penalty, s.early_stopping, ends, s.max_tokens)
        seq = Sequence(group, 0, list(request.prompt), rng=random.Random(f"{seed}/0"), grammar=s.grammar)
        seq.watch = request.watch() if request.watch is not None else None
        group.sequences.append(seq)
        self.groups[request.id] = group
        if self.imports is not None and self.imports.takes(request):
            self.imports.add(seq)
        else:
            self.scheduler.add(seq)

    def validate(self, request: EngineRequest) -> None:
        """Raise :class:`Invalid`, naming the field, for a request that could never be served."""
        if request.id in self.groups:
            raise Invalid("id", f"{request.id!r} is being served already", "choose another")
        check_served(request, self.spec, self.max_model_len, self.adapters, self.scheduler.order is not None)

    def abort(self, request_id: str) -> bool:
        """Cancel a request; its blocks are free at once, and the next step reports its end. False: it is unknown."""
        return self.outputs.abort(request_id)

    def finish(self, request_id: str, index: int) -> None:
        """End one output without an event: its reader has found that the text is complete."""
        self.outputs.finish(request_id, index)

    def load_adapter(self, name: str, folder: Path, replace: bool = False) -> None:
        """Make an adapter available under ``name``; ``replace``: in place of one that no request uses. Raises
        :class:`UserError` if it does not fit."""
        if self.adapters is None:
            raise Invalid("lora_name", "this engine serves the base model alone", "switch on multi_adapter")
        self._settle()
        if replace:
            self._unused(name)
        self.adapters.load(name, folder, replace)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises :class:`Invalid` while requests use it, or if there is none."""
        self._settle()
        self._unused(name)
        if self.adapters is None:
            raise Invalid("lora_name", "this engine serves the base model alone", "switch on multi_adapter")
        self.adapters.unload(name)

    def warm_up_adapters(self) -> None:
        """Capture the steps with the adapters that are loaded, so that no request waits for it. Does nothing where
        steps are not captured."""
        if self.runner.graphs is not None:
            self._settle()
            self.runner.graphs.warm_up_adapted()

    def _unused(self, adapter: str) -> None:
        using = sum(g.request.adapter == adapter for g in self.groups.values())
        if using:
            raise Invalid("lora_name", f"{using} requests are using {adapter!r}", "wait for them, or cancel them")

    def reset_prefix_cache(self) -> int:
        """Forget all cached prompts → blocks that they took."""
        return self.blocks.reset()

    def started(self, request_id: str) -> bool:
        """Whether a request that has not ended was scheduled already."""
        group = self.groups.get(request_id)
        return group is not None and group.cached_tokens >= 0

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        flying = self.ahead is not None and self.ahead.flying is not None
        return bool(self.outputs.events or self.scheduler.running or self.scheduler.waiting or flying)

    # ---- a step --------------------------------------------------------------------------------------------------

    def go_ahead(self) -> str:
        """Launch steps before the tokens of the last one are known, from now on → why that cannot be; "" if it can."""
        reasons = {
            "the model is divided over ranks": isinstance(self.runner, RankedRunner),
            "tokens are drafted": self.drafter is not None,
            "caches are exchanged with other servers": self.exports is not None or self.imports is not None,
            "evicted blocks are kept elsewhere": self.blocks.store is not None,
        }
        why = next((why for why, holds in reasons.items() if holds), "")
        self.ahead = None if why else AsyncSteps(self)
        return why

    @torch.inference_mode()
    def _settle(self) -> None:
        """Have nothing on its way to the host."""
        if self.ahead is not None:
            self.ahead.settle()

    @torch.inference_mode()
    def step(self) -> list[OutputEvent]:
        """One iteration → the events of all outputs that have any.

        Raises :class:`ridgeline.serve.rank_channel.RankLost` when the ranks of a divided model fall apart.
        """
        start, before, drafted = time.perf_counter(), self.outputs.generated, self._drafted
        if self.imports is not None:
            self.imports.admit()
        self._draft()
        batch = self.scheduler.schedule()
        self._steps += bool(batch.tokens)
        ahead = self.ahead is not None and self.ahead.takes(batch)
        if self.ahead is not None:
            self.ahead.step(batch) if ahead else self.ahead.settle(batch)
        if batch.tokens and not ahead:
            decoding = all(s.generated and n == 1 + len(s.draft) for s, n in batch.tokens.items())
            self.runner.restoring = self.blocks.restore()
            self._compute(batch)
            self.runner.restoring = None
            if self.drafter is not None and decoding:
                tokens, seconds = self.outputs.generated - before, time.perf_counter() - start
                self.drafter.observe(len(batch.tokens), self._drafted > drafted, tokens, seconds)
        events = self.outputs.take_events()
        if self.exports is not None:
            self.exports.report(events)
        return events

    def _draft(self) -> None:
        """Let the drafter propose tokens for sequences that are decoding."""
        running = self.scheduler.running
        most = self.drafter.tokens(len(running)) if self.drafter is not None else 0
        if not most or self.drafter is None:
            return
        able = [s for s in running if s.total - s.n_computed == 1 and draftable(s)]
        room = [min(most, s.group.request.sampling.max_tokens - s.generated - 1) for s in able]
        for seq, draft in zip(able, self.drafter.propose(able, room), strict=True):
            seq.draft, seq.parents = draft
            self._drafted += len(seq.draft)

    def order(self, step: StepBatch) -> list[tuple[Sequence, int]]:
        """A batch in the order of its rows: those of one adapter are neighbors."""
        batch = list(step.tokens.items())
        if self.adapters is not None:
            batch.sort(key=lambda item: item[0].group.request.adapter)
        return batch

    def count(self, seq: Sequence, n: int) -> None:
        """Count the next ``n`` tokens of a sequence for the statistics."""
        self._prompt_tokens += min(n, max(0, len(seq.group.request.prompt) - seq.n_computed))

    def _compute(self, step: StepBatch) -> None:
        """Run a batch through the model, and choose the next tokens of its sequences."""
        batch = self.order(step)
        try:
            if self.adapters is not None:
                self.adapters.activate(batch, self.runner.rows(batch))
            if self.exports is not None:  # what is sent has to be right
                batch = self._restored(batch)
                if not batch:
                    return
                self.exports.begin_pass(batch)
            hidden = self.runner.run(batch, step.copies)
            if self.exports is not None:
                self.exports.end_pass()
        except RankLost:
            raise
        except Exception as e:  # one faulty request must not fail the others: find it
            if len(batch) == 1:
                self.outputs.fail(batch[0][0], f"{type(e).__name__}: {e}")
                return
            for i, (seq, n) in enumerate(batch):
                if seq.finish is None and seq in self.scheduler.running:
                    self._compute(StepBatch({seq: n}, step.copies if i == 0 else []))
            return
        row, whole, copy = 0, dict(self._restored(batch)), OneCopy()
        ready: list[tuple[Sequence, int]] = []  # with the row of ``hidden`` that its next token follows from
        for seq, n in batch:
            if seq not in whole:
                row += n
                continue
            self.count(seq, n)
            pool(seq, hidden[row : row + n], self.runner)
            prompt_logprobs(seq, hidden[row : row + n], self.runner, self.sampler, self.rows_at_once, copy)
            row += n
            seq.n_computed += n
            if seq.n_computed < len(seq.tokens):
                self.blocks.commit(seq)
            elif seq.group.request.embed:
                end_pooled(seq, self.outputs)
            else:
                ready.append((seq, row - 1 - len(seq.draft)))
        several = [(one, at) for seq, at in ready for one in self.next_tokens.forked(seq)]
        for at in range(0, len(several), self.rows_at_once):
            some = [s for s in several[at : at + self.rows_at_once] if s[0].finish is None]
            self.next_tokens.choose(some, hidden, copy)
        copy.read()

    def _restored(self, batch: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Wait for what this step restores → the sequences of ``batch`` that have all of it; others join again, and
        compute what is missing."""
        lost = self.runner.restoring.finish() if self.runner.restoring is not None else set()
        if not lost:
            return batch
        self.blocks.forget(lost)
        held = [seq for seq in self.scheduler.running if not lost.isdisjoint(seq.blocks)]
        for seq in held:
            self.scheduler.compute_again(seq)
        arriving = self.imports.recompute(lost) if self.imports is not None else 0
        if held or arriving:
            log.warning("%d stored blocks of the cache are gone or damaged: what %d sequences had in them is computed"
                        " again", len(lost), len(held) + arriving)  # fmt: skip
        return [(seq, n) for seq, n in batch if seq not in held]

    def release(self) -> None:
        """Close the engine, and free its weights and its pool; it can say no more than its limits from then on. Raises
        :class:`Busy` while requests are being served."""
        if self.groups:
            raise Busy(f"{len(self.groups)} requests are being served", retry_after=1.0)
        self.close()
        self.ahead = None
        del self.runner, self.model, self.sampler, self.next_tokens, self.drafter, self.adapters
        self.scheduler.order = self.blocks.store = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Stop the processes of a divided model, and the thread of steps that go ahead."""
        if self.ahead is not None:
            self._settle()
            self.ahead.close()
        self.blocks.close()
        if isinstance(self.runner, RankedRunner):
            self.runner.close()

    # ---- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The engine's statistics."""
        b, s, o = self.blocks, self.scheduler, self.outputs
        return Stats(
            len(s.waiting) + len(s.arriving), len(s.running), b.count, b.used, len(b.cached), self._prompt_tokens,
            o.cached_tokens, o.generated, s.preemptions, self._steps, self._drafted, self.next_tokens.accepted,
            *((b.store.saved, b.store.restored) if b.store is not None else (0, 0)),
            sum(max(0, len(q.group.request.prompt) - q.n_computed) for q in (*s.waiting, *s.running)),
        )  # fmt: skip

    def held(self) -> dict[str, float]:
        """Bytes of weights, of what drafts too, and of the pool of keys and values."""
        drafts = self.drafter.model if self.drafter is not None else None
        models = [self.model, *([drafts] if drafts is not None else [])]
        weights = {t.data_ptr(): t.nbytes for m in models for t in (*m.parameters(), *m.buffers())}
        return {
            "parameters": float(sum(weights.values())),
            "kv_cache": float(sum(c.nbytes for c in self.runner.paged())),
        }

    def labels(self) -> list[str]:
        """What its results on a GPU are labeled with: who computes what."""
        return self.runner.kernels.notes()

    def check(self) -> None:
        """Assert what must hold between two steps."""
        alive = [s for g in self.groups.values() for s in g.sequences]
        queued = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.arriving]
        assert len(queued) == len(set(queued)), "a sequence is in two places"
        assert set(queued) == set(alive), "a sequence is lost, or runs without a request"
        assert all(s.n_computed <= len(s.tokens) and not s.draft and not s.parents for s in alive)
        assert not any(s.blocks for s in self.scheduler.waiting), "a waiting sequence holds blocks"
        self.blocks.check(alive)
