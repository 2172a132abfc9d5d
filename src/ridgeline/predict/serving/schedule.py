"""The schedule of a serving engine, simulated iteration by iteration: token budget, order, blocks, and preemption.

What an engine does by default and what the plan's techniques add is one :class:`~ridgeline.spec.scheduling.Scheduling`.
With the settings of Ridgeline's own engine (:mod:`ridgeline.serve.scheduler`), it forms exactly the batches that the
engine computes (a test compares them). Requests are assumed to differ behind a prefix that all of them may share: a
preempted one finds its own blocks again, and every one finds what is left of the shared ones.

Decoding sequences advance together: one counter of decode iterations determines how far each is, which ends when, and
how many need a block next, so that an iteration costs the same for one sequence as for hundreds, and a run in which
nothing can arrive or finish is one event. Only where one must be preempted, or padding counts, is every sequence
considered separately.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush

from ridgeline.predict.serving.arrivals import Arrival, Arrivals
from ridgeline.predict.serving.block_pool import BlockPool, SimulatedRequest
from ridgeline.predict.serving.discrete_events import Costs, SimulationOutcome, decode_iterations, until
from ridgeline.runtime.batch_order import CostOrderedBatches, CostTable, free, grid
from ridgeline.spec.scheduling import Scheduling

Then = Callable[[int], None]
"""What follows from a number of iterations."""


def _queued(job: SimulatedRequest) -> tuple[int, str]:
    """Length and adapter of a waiting request."""
    return job.tokens, ""


class Simulation:
    """One engine serving ``requests``; ``concurrency`` closes the loop. They reach it after ``request_s`` and slow the
    iteration in which they arrive by ``admission_s``. ``blocks``: in the pool; ``longest``: prompt and output together;
    ``mixes``: whether prompts and decoding share an iteration (otherwise prompts go first). ``prefix``: tokens at the
    beginning of all prompts that are the same. With ``record``, ``steps`` holds every batch: the tokens of each of its
    sequences, in order."""

    def __init__(
        self, costs: Costs, s: Scheduling, blocks: int, longest: int, requests: Sequence[Arrival],
        concurrency: int | None = None, request_s: float = 0.0, admission_s: float = 0.0, mixes: bool = True,
        record: bool = False, prefix: int = 0,
    ) -> None:  # fmt: skip
        self.costs, self.limits, self.longest, self.requests = costs, s.limits, longest, requests
        self.pool = BlockPool(blocks, s.block_size, s.share_prefixes, prefix)
        self.mixes = mixes
        self.order = None if s.cut is None else CostOrderedBatches(s.cut, s.limits, self._batch_costs(longest), free,
                                                                   _queued)  # fmt: skip
        self.arrivals = Arrivals(requests, concurrency, request_s, lambda r: r.prompt + r.output <= longest)
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: dict[SimulatedRequest, None] = {}
        self.admission_s, self.fresh, self.admitted = admission_s, 0, 0
        self.now = self.began = self.decoded = 0.0
        """The end and the beginning of the last run of iterations, and when the last one with decoding ended."""
        unset = [math.nan] * len(requests)
        self.out = SimulationOutcome(self.arrivals.sent, unset, [*unset], [r.output for r in requests])
        self.steps: list[list[int]] | None = [] if record else None
        self.own = False
        """Whether the step under way was to be one without the running sequences."""
        # State of the decoding sequences: see _gather.
        self.counted, self.step, self.cached = False, 0, 0
        self.ends: list[tuple[int, int, SimulatedRequest]] = []
        self.late: list[SimulatedRequest] = []
        self.places: list[int] = []
        self.lasts: Counter[float] = Counter()
        """How many of them got their last token when."""

    def _batch_costs(self, longest: int) -> CostTable:
        """Seconds of padded batches, as the engine measures them at its start."""
        limits, most = self.limits, max(1, min(longest, self.limits.max_num_batched_tokens))
        return CostTable({
            (length, batch): self.costs.mixed([(length, 0)] * batch, 0, 0)
            for length in [*grid(most), most] for batch in grid(limits.max_num_seqs)
            if batch == 1 or length * batch <= limits.max_num_batched_tokens
        })  # fmt: skip

    def run(self) -> SimulationOutcome:
        """Simulate until every request is answered or rejected."""
        single = self.limits.padded or self.steps is not None
        while True:
            for i in self.arrivals.until(self.now):
                r = self.requests[i]
                self.waiting.append(SimulatedRequest(i, r.prompt, r.prompt, r.prompt + r.output))
                self.fresh += 1
            moved = None if single else self._together()
            if moved is None:
                moved = self._one_by_one()
            if not moved:
                if math.isinf(self.arrivals.next):
                    self.out.rejected = self.arrivals.refused
                    return self.out
                self.now = max(self.now, self.arrivals.next)

    # ---- on counters -------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Count the decoding sequences by their ends and by their positions in their last block; the others are handled
        separately."""
        self.counted, self.cached = True, 0
        self.ends, self.late, self.places = [], [], [0] * self.pool.size
        self.lasts.clear()
        for job in self.running:
            self._sort_in(job)

    def _sort_in(self, job: SimulatedRequest) -> None:
        if job.decodes:
            job.offset = job.computed - self.step
            heappush(self.ends, (job.most - 1 - job.offset, job.order, job))
            self.places[job.offset % self.pool.size] += 1
            self.cached += job.computed
            self.lasts[job.last] += 1
        else:
            self.late.append(job)

    def _scatter(self) -> None:
        """Write the counters' state back to each sequence."""
        for _, _, job in self.ends if self.counted else ():
            self._known(job)
        self.counted = False

    def _known(self, job: SimulatedRequest) -> None:
        computed = self.step + job.offset
        if computed > job.computed:
            job.last = self.decoded
        job.computed, job.tokens = computed, computed + 1
        job.blocks = max(job.blocks, self.pool.needed(job.computed))
        self.pool.commit(job)

    def _together(self) -> bool | None:
        """Run the next iteration or run of them, returns whether there was any; None: a sequence must be preempted
        first."""
        if not self.counted:
            self._gather()
        lim, going = self.limits, len(self.ends)
        rows: dict[SimulatedRequest, int] = {}
        budget = lim.max_num_batched_tokens - (going if self.mixes else 0)
        need = self._blocks(1)
        if budget < 0 or need > self.pool.free:
            return None
        ahead = need
        if own := self._needs_own_step(going, self.late):
            self._admit(rows, lim.max_num_batched_tokens)
            if rows:
                self._pass(rows, 0, 0, True)
                return True
        alone = not going or not self.mixes
        for job in sorted(self.late, key=lambda j: j.tokens - j.computed > 1) if self.mixes else self.late:
            if n := self._share(job, budget, alone and not rows):
                rows[job] = n
                budget -= n
                ahead += max(0, self.pool.needed(self._extent(job, n)) - job.blocks)
        if ahead > self.pool.free:
            return None
        if self.mixes:
            self.pool.take(need)
        for job, n in rows.items():
            self._grow(job, n)
        if lim.continuous or not self.running:
            self._admit(rows, budget, alone)
        if not self.mixes:
            if rows:
                going = 0
            else:
                self.pool.take(need)
        if not rows and not going:
            return False
        self._pass(rows, going, need, bool(rows) or self._own_step_follows(own, going, self.late))
        return True

    def _pass(self, rows: dict[SimulatedRequest, int], going: int, need: int, once: bool) -> None:
        """Advance time with ``rows`` and the ``going`` decoding sequences; ``need`` blocks are already theirs.
        ``once``: by one iteration alone."""
        ones = [job for job, n in rows.items() if n == 1]
        cached = (self.cached if going else 0) + sum(job.computed for job in ones) + going + len(ones)
        most = 1 if once else self.ends[0][0] - self.step
        if most > 1 and self._blocks(most) - need > self.pool.free:
            most = 1
        prompts = [(n, job.computed) for job, n in rows.items() if n > 1]
        self._iterate(prompts, going + len(ones), cached, most, 0, lambda k: self._passed(rows, going, need, k))

    def _passed(self, rows: dict[SimulatedRequest, int], going: int, need: int, k: int) -> None:
        """``k`` iterations of :meth:`_pass` are over."""
        if going:
            for last, count in self.lasts.items():
                self._gap(last, k, count)
            self.decoded = self.now
            self.pool.take(self._blocks(k) - need)
            self.step += k
            self.cached += k * going
            while self.ends and self.ends[0][0] <= self.step:
                job = heappop(self.ends)[2]
                self._known(job)
                self.places[job.offset % self.pool.size] -= 1
                self.cached -= job.computed
                self._leave(job)
            self.lasts = Counter({self.now: len(self.ends)})
        self.late = [job for job in self.late if job not in rows]
        for job, n in self._committing(rows):
            if not self._computed(job, n):
                self._sort_in(job)

    def _committing(self, plan: dict[SimulatedRequest, int]) -> list[tuple[SimulatedRequest, int]]:
        """In the order in which the engine commits blocks: sequences without a next token first."""
        return sorted(plan.items(), key=lambda row: row[0].computed + row[1] >= row[0].tokens)

    def _blocks(self, k: int) -> int:
        """Number of blocks that the decoding sequences need in their next ``k`` iterations."""
        if self.limits.reserve:
            return 0
        size = self.pool.size
        whole, rest = divmod(k, size)
        return whole * len(self.ends) + sum(self.places[(-self.step - i) % size] for i in range(rest))

    # ---- one by one: see ridgeline.serve.scheduler, line by line -----------------------------------------------------

    def _one_by_one(self) -> bool:
        self._scatter()
        preempted, admitted = self.out.preemptions, self.admitted
        plan = self._schedule()
        steady = self.out.preemptions == preempted
        if plan:
            # Behind a request that joins, the next may go in a step of its own.
            joined = self.admitted > admitted
            self._step(plan, steady and not joined and not self._own_step_follows(self.own, 0, self.running))
        return bool(plan) or not steady

    def _schedule(self) -> dict[SimulatedRequest, int]:
        lim = self.limits
        plan: dict[SimulatedRequest, int] = {}
        budget = self._left(plan.values())
        joins = lim.continuous or not self.running
        preempted = self.out.preemptions
        self.own = self._needs_own_step(0, self.running)
        if self.own:
            self._admit(plan, budget)
            if plan:
                return plan
        if not self.mixes:
            for job in [j for j in self.running if not j.decodes]:
                if job.order >= 0 and (n := self._share(job, budget, not plan)) and self._room(job, n, plan):
                    plan[job] = n
                    budget -= n
            if joins and self.out.preemptions == preempted:
                self._admit(plan, budget)
            if plan:
                return plan
        for job in sorted(self.running, key=lambda j: j.tokens - j.computed > 1):
            if job.order < 0:  # preempted meanwhile
                continue
            n = self._share(job, budget, not plan)
            before = self.out.preemptions
            if n and self._room(job, n, plan):
                plan[job] = n
                budget -= n
            if lim.padded or self.out.preemptions > before:  # a preempted sequence may have been in the batch
                budget = self._left(plan.values())
        if joins and self.mixes and self.out.preemptions == preempted:
            self._admit(plan, budget)
        return plan

    def _needs_own_step(self, decoding: int, others: Collection[SimulatedRequest]) -> bool:
        """Whether the next prompt goes in a step without the running sequences: ``decoding`` ones that lack a token,
        and ``others``."""
        if self.limits.chunked or not self.mixes or not self.limits.continuous or not self.waiting or not self.running:
            return False
        counts = [1] * decoding + [job.tokens - job.computed for job in others]
        if self.order is not None:
            self.order(self.waiting)
        first = self.waiting[0]
        return first.tokens - self.pool.find(first) > self._left(counts)

    def _own_step_follows(self, own: bool, decoding: int, others: Collection[SimulatedRequest]) -> bool:
        """Whether a prompt that seemed to fit into this step (``own``: it did not) goes in the next one without the
        running sequences, which have taken blocks of the cache that it would have begun with."""
        return not own and self._needs_own_step(decoding, others)

    def _left(self, counts: Collection[int]) -> int:
        most = self.limits.max_num_batched_tokens
        if not self.limits.padded:
            return most - sum(counts)
        each = most // (len(counts) + 1)
        return each if each >= max(counts, default=0) else 0

    def _share(self, job: SimulatedRequest, budget: int, alone: bool) -> int:
        missing = job.tokens - job.computed
        if missing <= budget:
            return missing
        if self.limits.chunked:
            return budget
        return missing if alone else 0

    def _room(self, job: SimulatedRequest, n: int, plan: dict[SimulatedRequest, int]) -> bool:
        while not self._grow(job, n):
            victim, _ = self.running.popitem()
            plan.pop(victim, None)
            self.pool.release(victim)
            victim.order = -1
            self.waiting.appendleft(victim)
            self.out.preemptions += 1
            if victim is job:
                return False
        return True

    def _extent(self, job: SimulatedRequest, n: int) -> int:
        return max(min(job.most, self.longest) if self.limits.reserve else 0, job.computed + n)

    def _grow(self, job: SimulatedRequest, n: int) -> bool:
        return self.pool.grow(job, self._extent(job, n))

    def _admit(self, plan: dict[SimulatedRequest, int], budget: int, alone: bool = True) -> None:
        """Admit requests from the queue; ``alone``: only together with those in ``plan``."""
        most = math.inf if self.order is None else self.order(self.waiting)
        before = self.admitted
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            if self.admitted - before >= most:
                return
            job = self.waiting[0]
            self.pool.match(job)
            n = self._share(job, budget, alone and not plan)
            fits = not self.running or self.pool.needed(job.tokens) - job.blocks <= self.pool.free
            if not (n and fits and self._grow(job, n)):
                self.pool.release(job)
                return
            self.waiting.popleft()
            if job.tokens == job.prompt:
                self.out.cached_tokens += job.computed
            job.order, self.admitted = self.admitted, self.admitted + 1
            self.running[job] = None
            plan[job] = n
            budget = self._left(plan.values()) if self.limits.padded else budget - n

    # ---- iterations --------------------------------------------------------------------------------------------------

    def _iterate(
        self, prompts: list[tuple[int, int]], decoding: int, cached: int, most: int, pads: int, then: Then
    ) -> None:
        """Run one iteration, or up to ``most`` like it until a request arrives that could join, ``then`` what follows
        from it."""
        k, each, slope = self._length(prompts, decoding, cached, most, pads)
        if not prompts and self.limits.continuous and not self.waiting:
            k = until(self.arrivals.next - self.now, each, slope, k)
        then(self._spend(k, each, slope, prompts))

    def _length(
        self, prompts: list[tuple[int, int]], decoding: int, cached: int, most: int, pads: int
    ) -> tuple[int, float, float]:
        """(iterations, seconds of the first, increase from each to the next), at most ``most`` of them."""
        if prompts:
            return 1, self.costs.mixed(prompts, decoding, cached, pads), 0.0
        return decode_iterations(self.costs, decoding, cached, most)

    def _spend(self, k: int, each: float, slope: float, prompts: list[tuple[int, int]]) -> int:
        """Advance time by ``k`` iterations."""
        if prompts:
            self.out.prompt_iterations += 1
            self.out.prompt_tokens += sum(n for n, _ in prompts)
        seconds = k * each + slope * (k * (k - 1) / 2)
        seconds += self.fresh * self.admission_s
        self.fresh = 0
        self.began = self.now
        self.now += seconds
        self.out.busy_s += seconds
        self.out.iterations += k
        return k

    def _gap(self, last: float, tokens: int, count: int) -> None:
        """``count`` sequences got ``tokens`` tokens each in the last run of iterations, and the one before at ``last``,
        behind which they may have waited."""
        each, gaps = (self.now - self.began) / tokens, self.out.gaps
        for seconds, n in ((self.began - last + each, count), (each, count * (tokens - 1))):
            if gaps and gaps[-1][0] == seconds:
                gaps[-1] = seconds, gaps[-1][1] + n
            elif n:
                gaps.append((seconds, n))

    def _step(self, plan: dict[SimulatedRequest, int], steady: bool) -> None:
        """Compute ``plan`` and, if no request arrives or finishes (``steady``), the following iterations."""
        prompts = [(n, job.computed) for job, n in plan.items() if n > 1]
        decoding = len(plan) - len(prompts)
        cached = sum(job.computed for job in plan) - sum(before for _, before in prompts) + decoding
        pads = len(plan) * max(plan.values()) - sum(plan.values()) if self.limits.padded else 0
        most = self._lasting(plan) if steady and decoding == len(self.running) else 1
        self._iterate(prompts, decoding, cached, most, pads, lambda k: self._stepped(plan, k))

    def _stepped(self, plan: dict[SimulatedRequest, int], k: int) -> None:
        """``k`` iterations of :meth:`_step` are over."""
        if self.steps is not None:
            self.steps += [list(plan.values())] * k
        for job in plan if k > 1 else ():
            self.pool.grow(job, job.computed + k)
        for job, n in self._committing(plan):
            self._computed(job, n if n > 1 else k)

    def _lasting(self, plan: dict[SimulatedRequest, int]) -> int:
        """Number of equal iterations in a row, if no request arrives."""
        if any(job.tokens == job.prompt for job in plan):  # a prompt of one token: its first output is an event
            return 1
        k, n = min(job.most - job.tokens for job in plan), len(plan)
        tight = not self.limits.reserve and self.pool.free < n * (k // self.pool.size + 1)
        return 1 if tight else k

    def _computed(self, job: SimulatedRequest, n: int) -> bool:
        """Record that keys and values of ``n`` more tokens of a sequence are computed; the last known token yields the
        next one. Returns whether the sequence ends."""
        new = 0
        if job.tokens == job.computed + 1:  # each of them generated the next
            new = n
        elif job.tokens == job.computed + n:
            new = 1
        if new and job.tokens > job.prompt:
            self._gap(job.last, new, 1)
        if new:
            job.tokens, job.last = job.tokens + new, self.now
        job.computed += n
        self.pool.commit(job)
        if job.tokens > job.prompt and math.isnan(self.out.first[job.index]):
            self.out.first[job.index] = self.now
        if job.tokens < job.most:
            return False
        self._leave(job)
        return True

    def _leave(self, job: SimulatedRequest) -> None:
        del self.running[job]
        self.pool.release(job)
        self.out.finish[job.index] = self.now
        self.arrivals.answered(self.now)
