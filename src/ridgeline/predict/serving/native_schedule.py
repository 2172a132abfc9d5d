"""The schedule of Ridgeline's own engine (:mod:`ridgeline.serve.scheduler`), played iteration by iteration.

Unlike :class:`~ridgeline.predict.serving.discrete_events.Simulation`, which knows other engines by their averages, this
one computes the very batches that the real engine would: the same budget, order, blocks, and preempted sequences (a
test compares them). Requests are taken to differ, so that only a preempted one finds its own blocks again.
A stretch of iterations in which everybody decodes and nobody can come or go is one event.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.predict.serving.arrivals import Arrival, Arrivals
from ridgeline.predict.serving.discrete_events import Costs, SimulationOutcome, decode_iterations, until
from ridgeline.spec.scheduling import Scheduling


@dataclass(slots=True, eq=False)
class NativeRequest:
    """A request on its way."""

    index: int
    prompt: int
    tokens: int
    """The prompt and what was made so far."""
    most: int
    """Tokens at its end."""
    computed: int = 0
    blocks: int = 0
    committed: int = 0
    """Leading blocks whose contents are known by their hash."""
    runs: bool = False


class BlockPool:
    """Numbers of blocks: blank, held, and cached with the oldest going first, as the real pool keeps them."""

    def __init__(self, count: int, size: int, share: bool) -> None:
        self.size, self.share = size, share
        self.blank = count
        self.cached: OrderedDict[NativeRequest, int] = OrderedDict()
        """Leading blocks of sequences that let go of them, the last of which are given away first."""
        self.kept = 0

    @property
    def free(self) -> int:
        """Blocks that can be had."""
        return self.blank + self.kept

    def needed(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.size)

    def match(self, job: NativeRequest) -> None:
        """Take up what is left of a sequence's blocks."""
        found = self.cached.pop(job, 0)
        self.kept -= found
        job.blocks = job.committed = found
        job.computed = found * self.size

    def commit(self, job: NativeRequest) -> None:
        """Full blocks become known."""
        if self.share:
            job.committed = max(job.committed, job.computed // self.size)

    def grow(self, job: NativeRequest, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens, if they can be had."""
        missing = max(0, self.needed(tokens) - job.blocks)
        if missing > self.free:
            return False
        job.blocks += missing
        taken = min(missing, self.blank)
        self.blank -= taken
        for _ in range(missing - taken):
            oldest = next(iter(self.cached))
            self.cached[oldest] -= 1
            self.kept -= 1
            if not self.cached[oldest]:
                del self.cached[oldest]
        return True

    def release(self, job: NativeRequest) -> None:
        """Let go of a sequence's blocks."""
        self.blank += job.blocks - job.committed
        if job.committed:
            self.cached[job] = job.committed
            self.kept += job.committed
        job.blocks = job.committed = job.computed = 0


class PackedSimulation:
    """One engine serving ``requests``; ``concurrency`` closes the loop. They reach it after ``request_s`` and slow the
    iteration that they come in by ``admission_s``. ``blocks``: of the pool; ``longest``: prompt and output together.
    With ``record``, ``steps`` holds every batch: the tokens of each of its sequences, in order."""

    def __init__(
        self, costs: Costs, s: Scheduling, blocks: int, longest: int, requests: Sequence[Arrival],
        concurrency: int | None = None, request_s: float = 0.0, admission_s: float = 0.0, record: bool = False,
    ) -> None:  # fmt: skip
        self.costs, self.limits, self.longest, self.requests = costs, s.limits, longest, requests
        self.pool = BlockPool(blocks, s.block_size, s.share_prefixes)
        self.arrivals = Arrivals(requests, concurrency, request_s, lambda r: r.prompt + r.output <= longest)
        self.waiting: deque[NativeRequest] = deque()
        self.running: list[NativeRequest] = []
        self.admission_s, self.fresh, self.now = admission_s, 0, 0.0
        unset = [math.nan] * len(requests)
        self.out = SimulationOutcome(self.arrivals.sent, unset, [*unset], [r.output for r in requests])
        self.steps: list[list[int]] | None = [] if record else None

    def run(self) -> SimulationOutcome:
        """Simulate until every request is answered or rejected."""
        while True:
            for i in self.arrivals.until(self.now):
                r = self.requests[i]
                self.waiting.append(NativeRequest(i, r.prompt, r.prompt, r.prompt + r.output))
                self.fresh += 1
            sent_back = self.out.preemptions
            plan = self._schedule()
            steady = self.out.preemptions == sent_back
            if plan:
                self._step(plan, steady)
            elif not steady:
                continue
            elif math.isinf(self.arrivals.next):
                self.out.rejected = self.arrivals.refused
                return self.out
            else:
                self.now = max(self.now, self.arrivals.next)

    # ---- scheduling: see ridgeline.serve.scheduler, line by line ---------------------------------------------------

    def _schedule(self) -> dict[NativeRequest, int]:
        lim = self.limits
        plan: dict[NativeRequest, int] = {}
        budget = self._left(plan)
        joins = lim.continuous or not self.running
        sent_back = self.out.preemptions
        for job in sorted(self.running, key=lambda j: j.tokens - j.computed > 1):
            if not job.runs:  # preempted meanwhile
                continue
            n = self._share(job, budget, not plan)
            before = self.out.preemptions
            if n and self._room(job, n, plan):
                plan[job] = n
                budget -= n
            if lim.padded or self.out.preemptions > before:  # a preempted sequence may have been in the batch
                budget = self._left(plan)
        if joins and self.out.preemptions == sent_back:
            self._admit(plan, budget)
        return plan

    def _left(self, plan: dict[NativeRequest, int]) -> int:
        most, counts = self.limits.max_num_batched_tokens, plan.values()
        if not self.limits.padded:
            return most - sum(counts)
        each = most // (len(counts) + 1)
        return each if each >= max(counts, default=0) else 0

    def _share(self, job: NativeRequest, budget: int, alone: bool) -> int:
        missing = job.tokens - job.computed
        if missing <= budget:
            return missing
        if self.limits.chunked:
            return budget
        return missing if alone else 0

    def _room(self, job: NativeRequest, n: int, plan: dict[NativeRequest, int]) -> bool:
        while not self._grow(job, n):
            victim = self.running.pop()
            plan.pop(victim, None)
            self.pool.release(victim)
            victim.runs = False
            self.waiting.appendleft(victim)
            self.out.preemptions += 1
            if victim is job:
                return False
        return True

    def _grow(self, job: NativeRequest, n: int) -> bool:
        tokens = min(job.most, self.longest) if self.limits.reserve else 0
        return self.pool.grow(job, max(tokens, job.computed + n))

    def _admit(self, plan: dict[NativeRequest, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            job = self.waiting[0]
            self.pool.match(job)
            n = self._share(job, budget, not plan)
            fits = not self.running or self.pool.needed(job.tokens) - job.blocks <= self.pool.free
            if not (n and fits and self._grow(job, n)):
                self.pool.release(job)
                return
            self.waiting.popleft()
            job.runs = True
            self.running.append(job)
            plan[job] = n
            budget = self._left(plan) if self.limits.padded else budget - n

    # ---- iterations --------------------------------------------------------------------------------------------------

    def _step(self, plan: dict[NativeRequest, int], steady: bool) -> None:
        """Compute ``plan``, and where it is ``settled`` that nobody comes or goes, what follows it."""
        prompts = [(n, job.computed) for job, n in plan.items() if n > 1]
        decoding, k = len(plan) - len(prompts), 1
        cached = sum(job.computed for job in plan) - sum(before for _, before in prompts) + decoding
        if prompts:
            pads = len(plan) * max(plan.values()) - sum(plan.values()) if self.limits.padded else 0
            seconds = self.costs.mixed(prompts, decoding, cached, pads)
        else:
            most = self._lasting(plan) if steady and decoding == len(self.running) else 1
            k, each, slope = decode_iterations(self.costs, decoding, cached, most)
            if self.limits.continuous and not self.waiting:
                k = until(self.arrivals.next - self.now, each, slope, k)
            seconds = k * each + slope * (k * (k - 1) / 2)
        if self.steps is not None:
            self.steps += [list(plan.values())] * k
        seconds += self.fresh * self.admission_s
        self.fresh = 0
        self.now += seconds
        self.out.busy_s += seconds
        self.out.iterations += k
        if decoding:
            self.out.gaps.append((seconds / k, k * decoding))
        for job in plan if k > 1 else ():
            self.pool.grow(job, job.computed + k)
        for job, n in plan.items():
            self._computed(job, n if n > 1 else k)

    def _lasting(self, plan: dict[NativeRequest, int]) -> int:
        """How many iterations like this one follow each other, if nobody arrives."""
        if any(job.tokens == job.prompt for job in plan):  # a prompt of one token: its first answer is an event
            return 1
        k, n = min(job.most - job.tokens for job in plan), len(plan)
        tight = not self.limits.reserve and self.pool.free < n * (k // self.pool.size + 1)
        return 1 if tight else k

    def _computed(self, job: NativeRequest, n: int) -> None:
        """``n`` more tokens of a sequence have their keys and values; the last known one leads to another."""
        if job.tokens == job.computed + 1:  # each of them made the next
            job.tokens += n
        elif job.tokens == job.computed + n:
            job.tokens += 1
        job.computed += n
        self.pool.commit(job)
        if job.tokens > job.prompt and math.isnan(self.out.first[job.index]):
            self.out.first[job.index] = self.now
        if job.tokens >= job.most:
            self.running.remove(job)
            self.pool.release(job)
            self.out.finish[job.index] = self.now
            self.arrivals.answered(self.now)
