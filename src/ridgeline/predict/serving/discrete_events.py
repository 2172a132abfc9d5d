"""Discrete-event simulation of iteration-level scheduling (Orca, OSDI 2022; paged memory as in vLLM, SOSP 2023).

Every iteration gives each decoding sequence one token and spends what is left of the token budget on prompts, first
come first served. Between events (an arrival that can start, a finish, a full cache) decode iterations differ only in
the cached tokens, which grow by one per sequence: such a stretch is one event, its time a sum in closed form. All
decoding sequences advance together, so one counter of decode iterations tells who finishes when.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from ridgeline.predict.serving.arrivals import Arrival, Arrivals


class Costs(Protocol):
    """What the scheduler asks of the cost surface (:class:`ridgeline.predict.serving.iteration_time.Iterations`)."""

    def decode(self, n: int) -> tuple[float, float]:
        """(a, b) of the GPU seconds a + b · cached tokens in which ``n`` sequences get a token each."""

    def between(self, n: int) -> float:
        """Seconds added to those of a token."""

    def floor(self, n: int) -> float:
        """Least GPU seconds of a token: what the host does meanwhile."""

    def mixed(self, prompts: list[tuple[int, int]], n: int, cached: int, pads: int = 0) -> float:
        """Seconds of an iteration with prompt chunks and rows of padding."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine allows."""

    max_num_seqs: int
    max_num_batched_tokens: int
    cache_tokens: int
    chunked: bool = True
    mixes: bool = True
    reserves: bool = False
    request_s: float = 0.0
    overhead_tokens: int = 8
    """Cache lost per sequence to its last, part-filled block."""


@dataclass(slots=True)
class SimulatedRequest:
    """A request on its way."""

    index: int
    prompt: int
    """Tokens to prefill: the prompt, or after a preemption everything so far."""
    left: int
    """Tokens still to generate."""
    done: int = 0
    """Prompt tokens computed."""
    started: int = 0
    """Value of the decode counter when it began to decode."""
    order: int = 0
    """Admission number."""


@dataclass(slots=True)
class SimulationOutcome:
    """Per request, by index: times of arrival, first token and finish (nan: rejected); and what happened between."""

    arrival: list[float]
    first: list[float]
    finish: list[float]
    output: list[int]
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens): inter-token latencies, as (mean of a stretch, tokens in it)."""
    preemptions: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    rejected: int = 0


class Simulation:
    """One engine serving ``requests``; ``concurrency`` closes the loop (arrival times then follow from the answers)."""

    def __init__(
        self, costs: Costs, limits: EngineLimits, requests: Sequence[Arrival], concurrency: int | None = None
    ) -> None:
        self.costs, self.limits = costs, limits
        self.requests = requests
        self.now = 0.0
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: dict[int, SimulatedRequest] = {}
        self.partial: SimulatedRequest | None = None
        self.ends: list[tuple[int, int, int]] = []  # (decode count at the end, request, admission)
        self.step = 0
        self.cached = 0
        self.held = 0  # tokens set aside: whole outputs where the engine reserves, prompts under way elsewhere
        self.admitted = 0
        self.arrivals = Arrivals(requests, concurrency, limits.request_s, self._accepted)
        unset = [math.nan] * len(requests)
        self.out = SimulationOutcome(self.arrivals.sent, unset, [*unset], [r.output for r in requests])

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> SimulationOutcome:
        """Simulate until every request is answered or rejected."""
        while True:
            for i in self.arrivals.until(self.now):
                self.waiting.append(SimulatedRequest(i, self.requests[i].prompt, self.requests[i].output))
            chunks = self._schedule()
            if chunks:
                self._mixed(chunks)
            elif self.running:
                self._stretch()
            elif math.isinf(self.arrivals.next):
                self.out.rejected = self.arrivals.refused
                return self.out
            else:
                self.now = max(self.now, self.arrivals.next)

    def _accepted(self, r: Arrival) -> bool:
        """Whether a request could ever fit the cache."""
        return r.prompt + r.output + self.limits.overhead_tokens <= self.limits.cache_tokens

    # ---- scheduling ----------------------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[SimulatedRequest, int]]:
        """Prompt chunks of the next iteration."""
        lim = self.limits
        budget = lim.max_num_batched_tokens - (len(self.running) if lim.mixes else 0)
        chunks: list[tuple[SimulatedRequest, int]] = []
        if self.partial is not None and budget > 0:
            size = min(self.partial.prompt - self.partial.done, budget)
            chunks.append((self.partial, size))
            budget -= size
            if self.partial.done + size == self.partial.prompt:
                self.partial = None
        while self.waiting and self.partial is None:
            s = self.waiting[0]
            if len(self.running) + len(chunks) >= lim.max_num_seqs or not self._fits(s, len(chunks)):
                break
            if s.prompt <= budget:
                size = s.prompt
            elif lim.chunked and budget > 0:
                size = budget
                self.partial = s
            elif not lim.chunked and not chunks and s.prompt > lim.max_num_batched_tokens:
                size = s.prompt  # longer than any iteration may be: it runs by itself
            else:
                break
            self.waiting.popleft()
            self.held += s.prompt + (s.left if lim.reserves else 0)
            self.admitted += 1
            s.order = self.admitted
            chunks.append((s, size))
            budget -= size
        return chunks

    def _fits(self, s: SimulatedRequest, beside: int) -> bool:
        lim = self.limits
        sequences = len(self.running) + beside + 1
        need = s.prompt + (s.left if lim.reserves else 1)
        taken = self.held if lim.reserves else self.cached + self.held
        return taken + need + sequences * lim.overhead_tokens <= lim.cache_tokens

    # ---- iterations ----------------------------------------------------------------------------------------------

    def _mixed(self, chunks: list[tuple[SimulatedRequest, int]]) -> None:
        """One iteration with prompts in it."""
        decoding = len(self.running) if self.limits.mixes else 0
        if decoding and not self.limits.reserves:
            decoding -= self._preempt()
        seconds = self.costs.mixed([(size, s.done) for s, size in chunks], decoding, self.cached if decoding else 0)
        self._advance(1, seconds, decoding)
        for s, size in chunks:
            s.done += size
            if s.done == s.prompt:
                self._first_token(s)

    def _stretch(self) -> None:
        """As many equal decode iterations as fit before something changes."""
        lim = self.limits
        if not lim.reserves:
            self._preempt()
        n = len(self.running)
        k = self.ends[0][0] - self.step
        if not lim.reserves:
            room = lim.cache_tokens - lim.overhead_tokens * n - self.cached - self.held
            k = max(1, min(k, room // n))
        k, per, slope = decode_iterations(self.costs, n, self.cached, k)
        if not self.waiting and self.partial is None:
            k = until(self.arrivals.next - self.now, per, slope, k)
        self._advance(k, k * per + slope * (k * (k - 1) / 2), n)

    def _advance(self, k: int, seconds: float, decoding: int) -> None:
        """Time passes; each decoding sequence gets ``k`` tokens; the finished leave."""
        self.now += seconds
        self.out.busy_s += seconds
        self.out.iterations += k
        if not decoding:
            return
        self.out.gaps.append((seconds / k, k * decoding))
        self.step += k
        self.cached += k * decoding
        while self.ends and (self.ends[0][0] <= self.step or self._stale(self.ends[0])):
            end = heappop(self.ends)
            if not self._stale(end):
                self._leave(self.running.pop(end[1]))

    def _first_token(self, s: SimulatedRequest) -> None:
        lim = self.limits
        if math.isnan(self.out.first[s.index]):
            self.out.first[s.index] = self.now
        s.left -= 1
        self.cached += s.prompt + 1
        if not lim.reserves:
            self.held -= s.prompt
        s.started = self.step
        if s.left:
            self.running[s.index] = s
            heappush(self.ends, (self.step + s.left, s.index, s.order))
        else:
            self._leave(s)

    def _leave(self, s: SimulatedRequest) -> None:
        self.out.finish[s.index] = self.now
        self.cached -= s.prompt + 1 + s.left
        if self.limits.reserves:
            self.held -= s.prompt + 1 + s.left
        self.arrivals.answered(self.now)

    def _preempt(self) -> int:
        """Send the last admitted back to the queue until every decoding sequence has room for a token."""
        lim, gone = self.limits, 0
        while len(self.running) > 1:
            n = len(self.running)
            if self.cached + self.held + n + lim.overhead_tokens * n <= lim.cache_tokens:
                break
            s = max(self.running.values(), key=lambda r: r.order)
            del self.running[s.index]
            generated = self.step - s.started
            self.cached -= s.prompt + 1 + generated
            again = SimulatedRequest(s.index, s.prompt + 1 + generated, s.left - generated)
            self.waiting.appendleft(again)
            self.out.preemptions += 1
            gone += 1
        while self.ends and self._stale(self.ends[0]):
            heappop(self.ends)
        return gone

    def _stale(self, end: tuple[int, int, int]) -> bool:
        s = self.running.get(end[1])
        return s is None or s.order != end[2]


def decode_iterations(costs: Costs, n: int, cached: int, most: int) -> tuple[int, float, float]:
    """(iterations, seconds of the first, seconds that each takes more than the one before) of up to ``most`` decode
    iterations of ``n`` sequences with ``cached`` tokens in all."""
    a, b = costs.decode(n)
    between, host = costs.between(n), costs.floor(n)
    first = a + b * cached
    if host > first:  # the host is the slower of the two until the cache has grown
        grow = math.ceil((host - first) / (b * n)) if b else most
        return max(1, min(most, grow)), host + between, 0.0
    return most, first + between, b * n


def until(wait: float, per: float, slope: float, most: int) -> int:
    """The least number of iterations that take ``wait`` seconds or longer, each ``slope`` longer than the one before;
    at least 1, at most ``most``."""

    def total(k: int) -> float:
        return k * per + slope * (k * (k - 1) / 2)

    if wait <= 0 or total(most) < wait:
        return most if wait > 0 else 1
    if slope <= 0:
        k = math.ceil(wait / per)
    else:
        half = per - slope / 2
        k = math.ceil((math.sqrt(half * half + 2 * slope * wait) - half) / slope)
    k = min(max(k, 1), most)
    while k > 1 and total(k - 1) >= wait:
        k -= 1
    while k < most and total(k) < wait:
        k += 1
    return k
