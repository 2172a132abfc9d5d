"""Discrete-event simulation of a fleet: requests, iterations of all replicas, transfers, and changes of the fleet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from ridgeline.predict.fleet.members import Member, PoolModel, Routing
from ridgeline.predict.fleet.replica import FleetRequest, Replica
from ridgeline.predict.fleet.transfers import Sent, Transfers
from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.predict.serving.discrete_events import SimulationOutcome
from ridgeline.spec.fleet import FleetSpec

_FIRST, _LAST = 0, 1
"""Of events at the same time: what may join the next iteration, then the ends of iterations."""


@dataclass
class FleetOutcome:
    """What a simulated fleet did."""

    requests: SimulationOutcome
    """With the sums over all replicas."""
    members: list[Member]
    sent: Sent
    recomputed: int = 0
    """Requests that lost their replica."""
    counts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Replicas of each pool that take requests, as (since when, how many)."""


@dataclass(eq=False)
class Place:
    """The replicas of a request."""

    prompt: Member | None
    """None: the cache of the prompt has left it."""
    token: Member
    most: int
    """Tokens of the request when it is answered."""
    carried: FleetRequest | None = None
    """The request while its cache is on the way."""


class FleetSimulation:
    """A fleet serving ``requests``; ``clients`` closes the loop."""

    def __init__(
        self, spec: FleetSpec, models: Sequence[PoolModel], requests: Sequence[Arrival], clients: int | None = None,
        prefix: int = 0,
    ) -> None:  # fmt: skip
        self.spec, self.models, self.requests, self.prefix = spec, models, requests, prefix
        nans = [math.nan] * len(requests)
        self.out = SimulationOutcome(nans, [*nans], [*nans], [r.output for r in requests])
        self.routing = Routing(spec)
        self.members = self.routing.members
        self.transfers = Transfers(spec.transfer)
        self.result = FleetOutcome(self.out, self.members, self.transfers.sent)
        self.places: dict[int, Place] = {}
        self.held: deque[FleetRequest] = deque()
        """Requests that no replica could take yet."""
        self.now, self.unanswered, self.next, self.closed = 0.0, len(requests), 0, clients is not None
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()
        self.request_s = spec.fleet.router_s + max(m.request_s for m in models)
        for model in models:
            for _ in range(model.pool.replicas or 0):
                self.add(model)
        for _ in range(len(requests) if clients is None else clients):
            self._send()

    # ---- time --------------------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None], rank: int = _FIRST) -> None:
        """Do ``what`` at a time."""
        heappush(self._events, (when, rank, next(self._order), what))

    def run(self, until: float = math.inf) -> FleetOutcome:
        """Simulate until every request is answered or rejected, or until a time, from which it can go on."""
        while self.unanswered and self._events and self._events[0][0] <= until:
            self.now, _, _, what = heappop(self._events)
            what()
        parts = [m.replica.out for m in self.members]
        for name in ("preemptions", "iterations", "prompt_iterations", "prompt_tokens", "cached_tokens", "busy_s"):
            setattr(self.out, name, sum(getattr(part, name) for part in parts))
        self.out.gaps = [gap for part in parts for gap in part.gaps]
        return self.result

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """The next request is on its way, now or when it is due."""
        if self.next >= len(self.requests):
            return
        i, self.next = self.next, self.next + 1
        r = self.requests[i]
        self.out.arrival[i] = self.now if self.closed else r.arrival
        if not self._accepts(r):
            self.out.rejected += 1
            self.unanswered -= 1
            if self.closed:
                self._send()
            return
        job = FleetRequest(i, r.prompt, r.prompt, r.prompt + r.output)
        self.at(self.out.arrival[i] + self.request_s, lambda: self.route(job))

    def _accepts(self, r: Arrival) -> bool:
        """Whether some pool of each phase has room for it."""
        roles = {m.pool.role for m in self.models if m.made.longest >= r.prompt + r.output}
        return "mixed" in roles or {"prefill", "decode"} <= roles

    def route(self, job: FleetRequest) -> None:
        """Send a request to its replicas, or keep it until there are any."""
        left = job.most - job.tokens
        found = self.routing.place(Arrival(self.now, job.tokens, left))
        if found is None:
            self.held.append(job)
            return
        prompt, token = found
        self.places[job.index] = Place(prompt, token, job.most)
        for m in {prompt, token}:
            m.requests += 1
            m.sent += 1
        prompt.foreign += prompt.role == "decode"
        token.foreign += token.role == "prefill"
        token.promised += job.most
        most = job.most if prompt is token else min(job.tokens + 1, job.most)
        self._accept(prompt, FleetRequest(job.index, job.prompt, job.tokens, most, last=job.last))

    def _accept(self, m: Member, job: FleetRequest) -> None:
        m.replica.accept(job)
        end = m.replica.cut(self.now)
        if end is not None:
            self._ends(m, end)
        elif m.replica.under_way is None:  # begin when all that comes now is here
            self.at(self.now, lambda: self.wake(m), _LAST)

    def wake(self, m: Member) -> None:
        """Begin a replica's next iterations, if it is idle and has work."""
        if m.replica.under_way is None and m.state != "gone":
            end = m.replica.begin(self.now)
            if end is not None:
                self._ends(m, end)

    def _ends(self, m: Member, end: float) -> None:
        version = m.replica.version

        def ended() -> None:
            if version == m.replica.version:
                m.replica.end()
                self.wake(m)

        self.at(end, ended, _LAST)

    def _left(self, replica: Replica, job: FleetRequest) -> None:
        """A request ends at a replica: it is answered, or its cache goes on to the other one."""
        place = self.places[job.index]
        if job.most < place.most:
            self.send(job, place, replica.now)
            return
        replica.pool.release(job)
        self.out.finish[job.index] = replica.now
        self.unanswered -= 1
        self.vacate(self.places.pop(job.index))
        if self.closed:
            self._send()

    def send(self, job: FleetRequest, place: Place, now: float) -> None:
        """Send the cache of a request from its prompt's replica to the one that generates the rest."""
        assert place.prompt is not None
        token, place.carried = place.token, job
        end = self.transfers.send(job, place.prompt, token, now)

        def arrived() -> None:
            if self.places.get(job.index) is place and place.token is token:
                self._arrived(job, place)

        self.at(end, arrived)

    def _arrived(self, job: FleetRequest, place: Place) -> None:
        prompt, place.prompt, place.carried = place.prompt, None, None
        assert prompt is not None
        prompt.replica.pool.release(job)
        self._leave(prompt, "decode", prompt is not place.token)
        brought = FleetRequest(job.index, job.prompt, job.tokens, place.most, last=job.last, kept=job.tokens - 1)
        self._accept(place.token, brought)
        self.wake(prompt)

    def vacate(self, place: Place) -> None:
        """The replicas of a request have no more to do for it."""
        place.token.promised -= place.most
        if place.prompt is not None:
            self._leave(place.prompt, "decode", place.prompt is not place.token)
        self._leave(place.token, "prefill", True)

    def _leave(self, m: Member, foreign_to: str, whole: bool) -> None:
        """One phase of a request is over at a replica; ``whole``: so is the request."""
        m.foreign -= m.role == foreign_to
        m.requests -= whole
        self.routing.settle(m)
        if m.state == "draining" and not m.requests:
            self.remove(m)

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def add(self, model: PoolModel, start_s: float = 0.0) -> Member:
        """A new replica, which takes requests in ``start_s``."""
        replica = Replica(model.costs, model.made, self.out, self._left, model.admission_s, self.prefix)
        m = Member(model, replica, len(self.members), self.now, state="starting" if start_s else "up")
        self.members.append(m)
        if start_s:
            self.at(self.now + start_s, lambda: self._up(m))
        else:
            self._up(m)
        return m

    def _up(self, m: Member) -> None:
        if m.state == "gone":
            return
        m.state = "up"
        self.routing.changed()
        waiting, self.held = self.held, deque()
        for job in waiting:
            self.route(job)

    def drain(self, m: Member) -> None:
        """A replica gets no more requests, and ends when it has none."""
        m.state = "draining"
        self.routing.changed()
        if not m.requests:
            self.remove(m)

    def remove(self, m: Member) -> None:
        """A replica ends."""
        m.state, m.died = "gone", self.now
        self.routing.changed()

    def lose(self, m: Member) -> None:
        """A replica is lost with all caches in it: its requests are computed again elsewhere, with what they have
        generated as a part of their prompt."""
        here = {job.index: job for job in m.replica.stop(self.now)}
        self.remove(m)
        for i, place in [(i, p) for i, p in self.places.items() if m in (p.prompt, p.token)]:
            if place.prompt not in (None, m):  # the prompt's replica computes it still, or its cache was on the way
                self._elsewhere(i, place)
                continue
            job = place.carried or here[i]
            self.vacate(self.places.pop(i))
            self.result.recomputed += 1
            self.route(FleetRequest(i, job.prompt, job.tokens, place.most, last=job.last))

    def _elsewhere(self, index: int, place: Place) -> None:
        """Another replica generates the tokens of a request whose own is gone."""
        r = self.requests[index]
        found = self.routing.place(r)
        token = place.prompt if found is None else found[1]
        assert token is not None
        place.token.requests -= 1
        place.token.promised -= place.most
        place.token = token
        token.promised += place.most
        token.foreign += token.role == "prefill"
        if token is not place.prompt:
            token.requests += 1
            token.sent += 1
        if place.carried is not None:
            self.send(place.carried, place, self.now)
