"""The scheduler: each step advances ``n_computed`` towards ``total``, and nothing else (Orca, OSDI 2022; vLLM's V1).

There are no phases. A sequence that lacks one token decodes, one that lacks many prefills; both are rows of one packed
batch under a token budget. Running sequences go first, in the order of their admission and those that lack one token
before those that lack more; then the queue, by priority. Where a prompt may not be cut and does not fit beside them, it
goes in a step without them (vLLM's V0). When the pool is full, the last admitted sequence of the
lowest priority is preempted: it returns to the front of the queue to be recomputed, and usually finds a prefix of its
blocks still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ridgeline.serve.block_manager import Blocks, Copy
from ridgeline.serve.fair_shares import FairShares
from ridgeline.serve.sequence import Sequence
from ridgeline.spec.errors import UserError
from ridgeline.spec.scheduling import Limits


@dataclass
class StepBatch:
    """One step: how many tokens of which sequences, and the blocks to copy first."""

    tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


Order = Callable[[deque[Sequence]], int]
"""A policy: puts the queue in serving order, and returns how many from its front may join now."""


class Scheduler:
    """The queue and the running sequences of one engine."""

    def __init__(self, blocks: Blocks, limits: Limits, max_model_len: int, whole: bool = False) -> None:
        """``whole``: a prompt must be computed in one step (encoders)."""
        self.blocks, self.limits, self.max_model_len, self.whole = blocks, limits, max_model_len, whole
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.arriving: list[Sequence] = []
        """Sequences whose prompt another server computes."""
        self.order: Order | None = None
        self.fair: FairShares | None = None
        """Between clients, among requests of one priority; None: in the order of their arrival."""
        self.preemptions = 0
        self._admitted = 0

    def add(self, seq: Sequence) -> None:
        """Put a sequence into the queue, behind those of its priority."""
        if self.fair is not None:
            self.fair.arrive(seq.group.request.client, {s.group.request.client for s in self.waiting})
        at, own = len(self.waiting), seq.group.request.priority
        while at and self.waiting[at - 1].group.request.priority > own:
            at -= 1
        self.waiting.insert(at, seq)

    def _again(self, seq: Sequence) -> None:
        """Put a preempted sequence into the queue, before those of its priority."""
        at, own = 0, seq.group.request.priority
        while at < len(self.waiting) and self.waiting[at].group.request.priority < own:
            at += 1
        self.waiting.insert(at, seq)

    def run(self, seq: Sequence, beside: Sequence) -> None:
        """Add a fork to the running sequences, behind the one that it was forked from."""
        seq.admitted = beside.admitted
        at = self.running.index(beside) + 1 if beside in self.running else 0
        if beside not in self.running:
            seq.admitted = -1
            self._again(seq)
        else:
            self.running.insert(at, seq)

    def join(self, seq: Sequence) -> None:
        """Run a sequence that has its blocks already."""
        self._admitted += 1
        seq.admitted = self._admitted
        self.running.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif seq in self.arriving:
            self.arriving.remove(seq)
        self.blocks.release(seq)

    def schedule(self) -> StepBatch:
        """The next step."""
        batch, lim = StepBatch(), self.limits
        unfinished = [s for s in self.running if s.total > s.n_computed]
        joins = lim.continuous or not unfinished  # beams that wait for others of their search do not block others
        if joins and self._needs_own_step(unfinished):
            self._admit(batch)
            if batch.tokens:
                for seq in unfinished:  # which are not in this step
                    self.drop_draft(seq)
                return batch
        # Decodes first: a prompt must not delay the next tokens of running sequences.
        for seq in sorted(unfinished, key=lambda s: s.total - s.n_computed > 1 + len(s.draft)):
            if seq.admitted < 0:  # preempted meanwhile
                continue
            if len(batch.tokens) >= lim.max_num_seqs:  # forks of a request that asks for more than that at once
                self.drop_draft(seq)
                continue
            n = self._share(seq, self._left(batch.tokens.values()), not batch.tokens)
            if n and self._room(seq, n, batch):
                batch.tokens[seq] = n
        if joins and not batch.preempted:
            self._admit(batch)
        return batch

    def _needs_own_step(self, unfinished: list[Sequence]) -> bool:
        """Whether the next prompt may not be cut and does not fit beside the running sequences: these wait for a step,
        as it could otherwise have to wait until they end."""
        if self.limits.chunked or not self.waiting or not unfinished:
            return False
        if self.order is not None:
            self.order(self.waiting)
        seq = self._next()
        missing = seq.total - (self.blocks.find(seq) if self._matches(seq) else 0)
        return missing > self._left([s.total - s.n_computed for s in unfinished])

    def _left(self, counts: Collection[int]) -> int:
        """Number of tokens that one more sequence may add to a step with ``counts``."""
        most = self.limits.max_num_batched_tokens
        if not self.limits.padded:
            return most - sum(counts)
        each = most // (len(counts) + 1)
        return each if each >= max(counts, default=0) else 0

    def _share(self, seq: Sequence, budget: int, alone: bool) -> int:
        """Tokens of ``seq`` that fit the budget; a prompt that may not be cut and exceeds every budget goes alone."""
        missing = seq.total - seq.n_computed
        if missing <= budget:
            return missing
        if seq.draft:
            missing -= len(seq.draft)
            self.drop_draft(seq)
            if missing <= budget:
                return missing
        if self.limits.chunked and not self.whole:
            return budget
        return missing if alone else 0

    def _room(self, seq: Sequence, n: int, batch: StepBatch) -> bool:
        """Blocks for the next ``n`` tokens of a running sequence, preempting those admitted last if necessary."""
        while (copies := self._grow(seq, n)) is None:
            victim = max(reversed(self.running), key=lambda s: s.group.request.priority)
            if victim is seq:
                victim = self._idle() or seq
            self._preempt(victim, batch)
            if victim is seq:
                return False
        batch.copies += copies
        return True

    def _grow(self, seq: Sequence, n: int) -> list[Copy] | None:
        if self.whole:
            return []
        longest = self._longest(seq)
        tokens = longest if self.limits.reserve else seq.n_computed + n
        return self.blocks.grow(seq, max(tokens, seq.n_computed + n), longest)

    def _longest(self, seq: Sequence) -> int:
        """Tokens that a sequence may have in the end."""
        return min(len(seq.group.request.prompt) + seq.group.request.sampling.max_tokens, self.max_model_len)

    def drop_draft(self, seq: Sequence) -> None:
        """Drop what is left of a draft, and give back the blocks that it had taken."""
        if seq.draft:
            self.blocks.shrink(seq, self._longest(seq) if self.limits.reserve else len(seq.tokens))
        seq.drop_draft()

    def _preempt(self, seq: Sequence, batch: StepBatch) -> None:
        batch.tokens.pop(seq, None)
        batch.preempted.append(seq)
        held = set(seq.blocks)
        batch.copies = [c for c in batch.copies if c[1] not in held]
        self._put_back(seq)
        self.preemptions += 1
        seq.group.preemptions += 1

    def _put_back(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)
        seq.admitted, seq.group.hidden = -1, None
        seq.drop_draft()
        self._again(seq)

    def compute_again(self, seq: Sequence) -> None:
        """Put back a running sequence that holds a block without the contents that it was taken for; one that has
        generated nothing yet joins as if it were new."""
        group, total = seq.group, len(seq.tokens)
        if not seq.generated and group.cached_tokens >= 0:
            if self.fair is not None:
                self.fair.admit(group.request.client, group.cached_tokens - total)
            group.cached_tokens = -1
        self._put_back(seq)

    def _idle(self) -> Sequence | None:
        """The last beam that only waits for others of its search: recomputing it is better than a deadlock."""
        return next((s for s in reversed(self.running) if s.total == s.n_computed), None)

    def _admit(self, batch: StepBatch) -> None:
        most = self.order(self.waiting) if self.order is not None else None
        before = self._admitted
        while self.waiting and (budget := self._left(batch.tokens.values())) > 0:
            if most is not None and self._admitted - before >= most:
                return
            seq = self._next()
            busy = sum(s.width for s in self.running if s.total > s.n_computed)
            if busy and busy + seq.width > self.limits.max_num_seqs:
                return
            found = self.blocks.match(seq) if self._matches(seq) else 0
            n = self._share(seq, budget, not batch.tokens)
            copies = self._grow(seq, n) if n and (self.whole or self._fits(seq)) else None
            if copies is None:
                self.blocks.release(seq)
                if n and not batch.tokens and not busy and (idle := self._idle()) is not None:
                    self._preempt(idle, batch)
                    self.waiting.remove(seq)
                    self.waiting.appendleft(seq)
                    continue
                return
            if seq.group.cached_tokens < 0:
                seq.group.cached_tokens = found
                if self.fair is not None:
                    self.fair.admit(seq.group.request.client, seq.total - found)
            self.waiting.popleft()
            self.join(seq)
            batch.tokens[seq] = n
            batch.copies += copies

    def _next(self) -> Sequence:
        """The sequence that joins next, which is brought to the front of the queue."""
        seq = self.waiting[0]
        if self.fair is None or seq.group.cached_tokens >= 0:  # a preempted one goes on
            return seq
        own = seq.group.request.priority
        equal = [s for s in self.waiting if s.group.request.priority == own]
        client = self.fair.first({s.group.request.client for s in equal})
        seq = next(s for s in equal if s.group.request.client == client)
        if seq is not self.waiting[0]:
            self.waiting.remove(seq)
            self.waiting.appendleft(seq)
        return seq

    def _matches(self, seq: Sequence) -> bool:
        """Whether a prompt may begin with blocks of the cache: not where each of its tokens has an output."""
        request = seq.group.request
        return not (self.whole or request.embed or request.sampling.prompt_logprobs is not None)

    def _fits(self, seq: Sequence) -> bool:
        """Whether the pool has room for all known tokens of a sequence, so that its prompt is not started in vain."""
        return self.blocks.needed(seq.total) - len(seq.blocks) <= self.blocks.free or not self.running


def share(scheduler: Scheduler, policy: str) -> None:
    """Let ``policy`` (see :mod:`.fair_shares`) decide who goes next. Raises :class:`UserError` where it cannot."""
    if policy == "fair" and scheduler.order is not None:
        raise UserError("the plan orders the queue by batches' cost, not by clients", "leave length_dp out")
    scheduler.fair = FairShares() if policy == "fair" else None
