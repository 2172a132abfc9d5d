"""The engine: requests in, steps, events out. Synchronous and deterministic; no threads, no HTTP, no text.

A step asks the scheduler what to compute, runs one packed batch, and lets each sequence whose last known token was
computed choose the next one. Everything that ends, forks or fails does so between two steps.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.beam import Beams
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.drafting import Drafting
from ridgeline.serve.ranks import Lost, RankedRunner
from ridgeline.serve.request import Busy, Event, Finish, Invalid, Request, Stats, TokenLogprob, check_request
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.scheduler import Plan, Scheduler
from ridgeline.serve.sequence import Group, Sequence
from ridgeline.spec.scheduling import Limits

LOGITS = 1 << 24
"""Logits that are there at once: sampling takes a few times their 64 MB, and a request may have many outputs."""


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
        self.groups: dict[str, Group] = {}
        self.adapters: AdapterTable | None = None
        self.drafter: Drafting | None = None
        self._random = random.Random(seed)
        self._events: list[Event] = []
        self._prompt_tokens = self._cached_tokens = self._generated = self._steps = 0
        self._drafted = self._accepted = 0

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises :class:`Invalid` for one that can never be served, :class:`Busy` for a full queue."""
        self.validate(request)
        waiting = self.scheduler.waiting
        tokens = sum(len(s.tokens) - s.n_computed for s in waiting)
        full = len(waiting) >= self.limits.max_waiting
        if full or (waiting and tokens + len(request.prompt) > self.limits.max_waiting_tokens):
            raise Busy(f"{len(waiting)} requests with {tokens} tokens are waiting already", retry_after=1.0)
        s = request.sampling
        seed = s.seed if s.seed is not None else self._random.getrandbits(64)
        group = Group(request, seed, scope=request.salt)
        if self.adapters is not None:
            group.scope = self.adapters.scope(request.adapter) + b"\0" + request.salt
        if s.beam_width:
            ends = frozenset() if s.ignore_eos else self.eos | set(s.stop_token_ids)
            group.beams = Beams(s.beam_width, s.length_penalty, s.early_stopping, ends, s.max_tokens)
        seq = Sequence(group, 0, list(request.prompt), rng=random.Random(f"{seed}/0"), grammar=s.grammar)
        seq.watch = request.watch() if request.watch is not None else None
        group.sequences.append(seq)
        self.groups[request.id] = group
        self.scheduler.add(seq)

    def validate(self, request: Request) -> None:
        """Raise :class:`Invalid`, naming the field, for a request that could never be served."""
        if request.adapter and (self.adapters is None or request.adapter not in self.adapters):
            raise Invalid("model", f"there is no adapter {request.adapter!r}", "load it, or name another")
        if request.id in self.groups:
            raise Invalid("id", f"{request.id!r} is being served already", "choose another")
        if request.priority and self.scheduler.order is not None:
            raise Invalid("priority", "has no effect: the plan orders the queue by batches' cost", "leave it out")
        check_request(request, self.spec, self.max_model_len)

    def abort(self, request_id: str) -> bool:
        """Cancel a request; its blocks are free at once, and the next step tells of the end. False: it is unknown."""
        group = self.groups.pop(request_id, None)
        if group is None:
            return False
        for seq in group.sequences:
            self.scheduler.remove(seq)
            self._events.append(Event(request_id, seq.index, finish="abort"))
        return True

    def finish(self, request_id: str, index: int) -> None:
        """End one output quietly: whoever reads the text found that it is complete."""
        group = self.groups.get(request_id)
        for seq in group.sequences if group else []:
            if seq.index == index:
                seq.finish = "stop"
                self._leave(seq)
                return

    def load_adapter(self, name: str, folder: Path) -> None:
        """Make an adapter available under ``name``. Raises :class:`UserError` if it does not fit."""
        if self.adapters is None:
            raise Invalid("lora_name", "this engine serves the base model alone", "switch on multi_adapter")
        self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises :class:`Invalid` while requests use it, or if there is none."""
        using = sum(g.request.adapter == name for g in self.groups.values())
        if using:
            raise Invalid("lora_name", f"{using} requests are using {name!r}", "wait for them, or cancel them")
        if self.adapters is None:
            raise Invalid("lora_name", "this engine serves the base model alone", "switch on multi_adapter")
        self.adapters.unload(name)

    def started(self, request_id: str) -> bool:
        """Whether a request that has not ended was scheduled already."""
        group = self.groups.get(request_id)
        return group is not None and group.cached_tokens >= 0

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.groups or self._events)

    # ---- a step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One iteration → news of all outputs that have any. Raises :class:`ridgeline.serve.ranks.Lost` when the ranks
        of a divided model fall apart."""
        start, before, drafted = time.perf_counter(), self._generated, self._drafted
        self._draft()
        plan = self.scheduler.schedule()
        if plan.tokens:
            self._steps += 1
            decoding = all(s.generated and n == 1 + len(s.draft) for s, n in plan.tokens.items())
            self._compute(plan)
            if self.drafter is not None and decoding:
                seconds = time.perf_counter() - start
                self.drafter.observe(len(plan.tokens), self._drafted > drafted, self._generated - before, seconds)
        events, self._events = self._events, []
        return events

    def _draft(self) -> None:
        """Let the drafter propose for sequences that decode by themselves."""
        running = self.scheduler.running
        most = self.drafter.tokens(len(running)) if self.drafter is not None else 0
        if not most or self.drafter is None:
            return
        able = [s for s in running if s.total - s.n_computed == 1 and _draftable(s)]
        room = [min(most, s.group.request.sampling.max_tokens - s.generated - 1) for s in able]
        for seq, draft in zip(able, self.drafter.propose(able, room), strict=True):
            seq.draft = draft
            self._drafted += len(draft)

    def _compute(self, plan: Plan) -> None:
        batch = list(plan.tokens.items())
        try:
            if self.adapters is not None:
                batch.sort(key=lambda item: item[0].group.request.adapter)
                self.adapters.activate(batch, self.runner.rows(batch))
            hidden = self.runner.run(batch, plan.copies)
        except Lost:
            raise
        except Exception as e:  # one request's fault must not be everybody's: find whose it is
            if len(batch) == 1:
                self._fail(batch[0][0], f"{type(e).__name__}: {e}")
                return
            for i, (seq, n) in enumerate(batch):
                if seq.finish is None:
                    self._compute(Plan({seq: n}, plan.copies if i == 0 else []))
            return
        row = 0
        rows: list[tuple[Sequence, int, int]] = []  # sequence, first of its rows of ``hidden``, tokens computed
        for seq, n in batch:
            rows.append((seq, row, n))
            row += n
            fresh = min(n, max(0, len(seq.group.request.prompt) - seq.n_computed))
            self._prompt_tokens += fresh
        self._read(rows, hidden)
        self._choose(rows, hidden)

    def _read(self, rows: list[tuple[Sequence, int, int]], hidden: Tensor) -> None:
        """What prompts ask for beside a next token: embeddings and log-probabilities of the prompt."""
        for seq, row, n in rows:
            group, prompt = seq.group, seq.group.request.prompt
            start, known = seq.n_computed, len(group.prompt_logprobs)
            if group.request.classify:
                if start == 0:
                    group.hidden = self.runner.logits(hidden[row : row + 1])[0].tolist()
            elif group.request.embed:
                total = hidden[row : row + n].double().sum(0)
                before = group.hidden
                group.hidden = (total if before is None else total + torch.tensor(before)).tolist()
            tops = group.request.sampling.prompt_logprobs
            stop = min(start + n, len(prompt) - 1)
            if tops is None or known < start:  # a preempted prompt is read again
                continue
            for at in range(known, stop, self.rows_at_once):
                end = min(stop, at + self.rows_at_once)
                logits = self.runner.logits(hidden[row + at - start : row + end - start])
                tokens = [int(t) for t in prompt[at + 1 : end + 1]]
                group.prompt_logprobs += self.sampler.logprobs(logits, tokens, [tops] * len(tokens))

    def _choose(self, rows: list[tuple[Sequence, int, int]], hidden: Tensor) -> None:
        """Advance every sequence; those whose last known token was computed choose what follows."""
        ready: list[tuple[Sequence, int]] = []
        for seq, row, n in rows:
            seq.n_computed += n
            if seq.n_computed < len(seq.tokens):
                self.blocks.commit(seq)
            elif seq.group.request.embed:
                self._embedded(seq)
            else:
                ready.append((seq, row + n - 1 - len(seq.draft)))
        several = [(one, row) for seq, row in ready for one in self._forked(seq)]
        for at in range(0, len(several), self.rows_at_once):
            self._choose_some([s for s in several[at : at + self.rows_at_once] if s[0].finish is None], hidden)

    def _choose_some(self, ready: list[tuple[Sequence, int]], hidden: Tensor) -> None:
        """What follows sequences, each with its row of ``hidden``; forks have one in common."""
        rows = list(dict.fromkeys(row for _, row in ready))
        if not rows:
            return
        logits = self.runner.logits(hidden[rows])
        if len(rows) < len(ready):
            place = {row: i for i, row in enumerate(rows)}
            logits = logits[[place[row] for _, row in ready]]
        for (seq, _), good in zip(ready, torch.isfinite(logits.amax(1)).tolist(), strict=True):
            if not good and seq.finish is None:
                self._fail(seq, "the model's logits are not finite")
        keep = [i for i, (seq, _) in enumerate(ready) if seq.finish is None]
        sampling = [i for i in keep if ready[i][0].group.beams is None]
        beams = [i for i in keep if ready[i][0].group.beams is not None]
        if sampling:
            self._sample(
                [ready[i] for i in sampling], logits if len(sampling) == len(ready) else logits[sampling], hidden
            )
        if beams:
            self._beam([ready[i][0] for i in beams], logits[beams])

    def _sample(self, expanded: list[tuple[Sequence, int]], logits: Tensor, hidden: Tensor) -> None:
        """Next tokens; where drafts agree with what is chosen, the ones after it too."""
        agreed = {seq: 0 for seq, _ in expanded}
        drafts = {seq: seq.draft for seq, _ in expanded}
        active = expanded
        while active:
            seqs = [seq for seq, _ in active]
            wanted = [i for i, s in enumerate(seqs) if _wants_logprobs(s)]
            raw = logits[wanted].clone() if wanted else None
            tokens = self._tokens(logits, active, hidden)
            said: dict[int, TokenLogprob] = {}
            fine = [k for k, i in enumerate(wanted) if tokens[i] >= 0]
            if raw is not None and fine:
                wanted = [wanted[k] for k in fine]
                tops = [seqs[i].group.request.sampling.logprobs or 0 for i in wanted]
                found = self.sampler.logprobs(raw[fine], [tokens[i] for i in wanted], tops)
                said = dict(zip(wanted, found, strict=True))
            further: list[tuple[Sequence, int]] = []
            for i, ((seq, row), token) in enumerate(zip(active, tokens, strict=True)):
                if token < 0 or seq.finish is not None:
                    continue
                draft = drafts[seq]
                done = agreed[seq]
                ended = self._append(seq, token, said.get(i))
                if not ended and done < len(draft) and draft[done] == token:
                    agreed[seq] = done + 1
                    further.append((seq, row + 1))
            active = further
            if active:
                logits = self.runner.logits(hidden[[row for _, row in active]])
        for seq, _ in expanded:
            if seq.finish == "error":
                continue
            self._accepted += agreed[seq]
            # Of what was computed, only what agrees with the tokens is valid; the rest is overwritten.
            seq.n_computed -= len(drafts[seq]) - agreed[seq]
            seq.draft = []
            self.blocks.commit(seq)
            self._tell(seq)
            if seq.finish is not None:
                self._leave(seq)

    def _tokens(self, logits: Tensor, active: list[tuple[Sequence, int]], hidden: Tensor) -> list[int]:
        """What the sampler chooses; where it fails, row by row, so that only the row at fault does: -1."""
        try:
            return self.sampler(logits, [seq for seq, _ in active])
        except Exception as e:
            if len(active) == 1:
                self._fail(active[0][0], f"{type(e).__name__}: {e}")
                return [-1]
        # Rows may have been changed already, and are taken anew.
        return [self._tokens(self.runner.logits(hidden[[row]]), [(seq, row)], hidden)[0] for seq, row in active]

    def _forked(self, seq: Sequence) -> list[Sequence]:
        """The sequence, and at the prompt's end the other outputs that the request wants, which share its blocks."""
        group = seq.group
        if seq.generated or len(group.sequences) > 1 or seq.width == 1 or group.beams is not None or group.done:
            return [seq]
        for index in range(1, seq.width):
            grammar = seq.grammar.fork() if seq.grammar is not None else None
            rng = random.Random(f"{group.seed}/{index}")
            child = Sequence(group, index, list(seq.tokens), rng=rng, grammar=grammar)
            child.watch = group.request.watch() if group.request.watch is not None else None
            self.blocks.fork(seq, child)
            group.sequences.append(child)
            self.scheduler.run(child, seq)
        return list(group.sequences)

    def _append(self, seq: Sequence, token: int, said: TokenLogprob | None) -> bool:
        """One more token → whether it is the last."""
        s = seq.group.request.sampling
        seq.tokens.append(token)
        seq.counts[token] = seq.counts.get(token, 0) + 1
        self._generated += 1
        if said is not None:
            seq.logprob += said.logprob
            if s.logprobs is not None:
                seq.logprobs.append(said)
        if seq.grammar is not None:
            try:
                seq.grammar.accept(token)
            except Exception as e:
                self._fail(seq, f"{type(e).__name__}: {e}")
                return True
        if token in s.stop_token_ids and seq.generated > s.min_tokens:
            seq.finish, seq.stop_token = "stop", token
        elif token in self.eos and not s.ignore_eos and seq.generated > s.min_tokens:
            seq.finish = "stop"
        else:
            if seq.watch is not None:
                seq.watch.push(token)
            if seq.watch is not None and seq.watch.stop is not None:
                seq.finish = "stop"
            elif seq.generated >= s.max_tokens:
                seq.finish = "length"
        return seq.finish is not None

    # ---- beams ---------------------------------------------------------------------------------------------------

    def _beam(self, seqs: list[Sequence], logits: Tensor) -> None:
        """Keep each beam's candidates; where all beams of a search have theirs, go on with the best."""
        most = max(s.group.beams.candidates for s in seqs if s.group.beams is not None)
        self.sampler.adjust(logits, seqs)
        whole = logits.logsumexp(1, keepdim=True)
        values, ids = self.sampler.search(logits, most)
        for seq, v, i in zip(seqs, (values - whole).tolist(), ids.tolist(), strict=True):
            assert seq.group.beams is not None
            n = seq.group.beams.candidates
            seq.group.beams.pending[seq] = list(zip(i[:n], v[:n], strict=True))
            self.blocks.commit(seq)
        for group in dict.fromkeys(s.group for s in seqs):
            if group.beams is not None and len(group.beams.pending) == len(group.sequences):
                try:
                    self._advance(group, group.beams)
                except Exception as e:
                    self._fail(group.sequences[0], f"{type(e).__name__}: {e}")

    def _advance(self, group: Group, beams: Beams) -> None:
        chosen = beams.select(group.sequences)
        if not chosen:
            self._beams_done(group, beams)
            return
        before, group.sequences = group.sequences, []
        taken: dict[Sequence, list[int]] = {}
        for c in chosen:
            taken.setdefault(c.beam, []).append(len(group.sequences))
            group.sequences.append(c.beam)
        for beam, places in taken.items():
            for at in places[1:]:
                child = Sequence(group, 0, list(beam.tokens), counts=dict(beam.counts))
                self.blocks.fork(beam, child)
                group.sequences[at] = child
                self.scheduler.run(child, beam)
        for beam in before:
            if beam not in taken:
                self.scheduler.remove(beam)
        for seq, c in zip(group.sequences, chosen, strict=True):
            seq.tokens.append(c.token)
            seq.counts[c.token] = seq.counts.get(c.token, 0) + 1
            seq.logprob = c.total
            self._generated += 1

    def _beams_done(self, group: Group, beams: Beams) -> None:
        for index, f in enumerate(beams.finished[: group.request.sampling.n]):
            finish: Finish = "stop" if f.stop else "length"
            self._events.append(Event(group.request.id, index, f.tokens, None, finish, score=f.score,
                                      cached_tokens=group.cached_tokens))  # fmt: skip
        for seq in group.sequences:
            self.scheduler.remove(seq)
        del self.groups[group.request.id]

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _tell(self, seq: Sequence) -> None:
        """News of what a sequence made since it was last told of."""
        group = seq.group
        if group.ranked:
            return
        prompt = len(group.request.prompt)
        event = Event(group.request.id, seq.index, seq.tokens[prompt + seq.told :])
        if group.request.sampling.logprobs is not None:
            event.logprobs, seq.logprobs = seq.logprobs, []
        if not seq.told and not seq.index and group.request.sampling.prompt_logprobs is not None:
            event.prompt_logprobs = group.prompt_logprobs
        seq.told = seq.generated
        if seq.finish is not None:
            event.finish, event.stop_token, event.cached_tokens = seq.finish, seq.stop_token, group.cached_tokens
        self._events.append(event)

    def _leave(self, seq: Sequence) -> None:
        """An output has ended: free its blocks; the last one ends its request."""
        group = seq.group
        self.scheduler.remove(seq)
        group.sequences.remove(seq)
        if group.ranked:
            group.done.append(seq)
        if group.sequences:
            return
        del self.groups[group.request.id]
        self._cached_tokens += max(0, group.cached_tokens)
        if group.ranked and not any(s.finish == "error" for s in group.done):
            best = sorted(group.done, key=lambda s: -s.logprob / max(1, s.generated))
            for index, one in enumerate(best[: group.request.sampling.n]):
                prompt = len(group.request.prompt)
                event = Event(group.request.id, index, one.tokens[prompt:], None, one.finish, one.stop_token)
                if group.request.sampling.logprobs is not None:
                    event.logprobs = one.logprobs
                event.cached_tokens = group.cached_tokens
                event.stop_string = one.watch.stop if one.watch is not None else None
                self._events.append(event)

    def _embedded(self, seq: Sequence) -> None:
        hidden = seq.group.hidden
        assert hidden is not None
        found = hidden if seq.group.request.classify else [v / len(seq.tokens) for v in hidden]
        if all(map(math.isfinite, found)):
            cached = seq.group.cached_tokens
            self._events.append(Event(seq.group.request.id, 0, finish="stop", embedding=found, cached_tokens=cached))
            seq.finish = "stop"
            self._leave(seq)
        else:
            self._fail(seq, "the model's hidden states are not finite")

    def _fail(self, seq: Sequence, why: str) -> None:
        """One output cannot go on: its request ends with an error, and nobody else is touched."""
        group = self.groups.pop(seq.group.request.id, None)
        for one in list(seq.group.sequences):
            one.finish, one.error = "error", why
            self.scheduler.remove(one)
            if group is not None:
                self._events.append(Event(seq.group.request.id, one.index, finish="error", error=why))
        seq.group.sequences.clear()

    def close(self) -> None:
        """Let the processes of a divided model go."""
        if isinstance(self.runner, RankedRunner):
            self.runner.close()

    # ---- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Where the engine stands."""
        b, s = self.blocks, self.scheduler
        return Stats(
            len(s.waiting), len(s.running), b.count, b.used, len(b.cached), self._prompt_tokens, self._cached_tokens,
            self._generated, s.preemptions, self._steps, self._drafted, self._accepted,
        )  # fmt: skip

    def check(self) -> None:
        """Assert what must hold between two steps."""
        alive = [s for g in self.groups.values() for s in g.sequences]
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert len(queued) == len(set(queued)), "a sequence is in two places"
        assert set(queued) == set(alive), "a sequence is lost, or runs without a request"
        assert all(s.n_computed <= len(s.tokens) and not s.draft for s in alive)
        assert not any(s.blocks for s in self.scheduler.waiting), "a waiting sequence holds blocks"
        self.blocks.check(alive)


def _draftable(seq: Sequence) -> bool:
    """Whether a draft may be checked in one pass: what follows must not change how its first token is chosen."""
    s = seq.group.request.sampling
    plain = not (s.presence_penalty or s.frequency_penalty) and s.repetition_penalty == 1.0
    return plain and seq.grammar is None and seq.group.beams is None and seq.generated > 0


def _wants_logprobs(seq: Sequence) -> bool:
    return seq.group.request.sampling.logprobs is not None or seq.group.ranked
