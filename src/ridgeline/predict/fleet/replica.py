"""One engine of a fleet: the simulated engine, whose iterations a fleet's clock begins, cuts short and ends.

A run of decode iterations is one event, as in a single engine's simulation. It is not known beforehand when the next
request will come, though: it depends on the other replicas. So a run is begun in full length, and a request that comes
meanwhile cuts it at the end of the iteration under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.predict.serving.block_pool import BlockPool, SimulatedRequest
from ridgeline.predict.serving.discrete_events import Costs, SimulationOutcome, until
from ridgeline.predict.serving.schedule import Simulation, Then
from ridgeline.predict.serving.simulate import EngineSetup


@dataclass(slots=True, eq=False)
class FleetRequest(SimulatedRequest):
    """A request at one replica."""

    kept: int = 0
    """Leading tokens whose keys and values came from another replica and are still here."""
    pending: int = 0
    """Tokens that it brought to be computed before its next one; 0 once they are."""
    since: float = 0.0
    """When it was admitted."""


class ReplicaPool(BlockPool):
    """Blocks of a replica, in which sequences may arrive with the cache of their prompt."""

    def find(self, job: SimulatedRequest) -> int:
        """As in :class:`BlockPool`, or what came from another replica."""
        return max(super().find(job), job.kept if isinstance(job, FleetRequest) else 0)

    def match(self, job: SimulatedRequest) -> None:
        """As in :class:`BlockPool`; what came from another replica need not be computed."""
        super().match(job)
        if isinstance(job, FleetRequest):
            job.computed = max(job.computed, job.kept)

    def release(self, job: SimulatedRequest) -> None:
        """As in :class:`BlockPool`. A running sequence that is preempted loses what it came with."""
        if isinstance(job, FleetRequest) and job.order >= 0:
            job.kept = 0
        super().release(job)


@dataclass(slots=True)
class _Run:
    """Iterations under way: ``k``, the first of ``each`` seconds, each ``slope`` longer than the one before."""

    k: int
    each: float
    slope: float
    prompts: list[tuple[int, int]]
    fresh: int
    then: Then
    cuttable: bool


class Replica(Simulation):
    """One engine. ``shared`` holds the times of all requests of the fleet; ``left`` is called with every request that
    ends here, whose blocks the fleet then releases."""

    def __init__(
        self, costs: Costs, made: EngineSetup, shared: SimulationOutcome, left: Callable[[Replica, FleetRequest], None],
        admission_s: float = 0.0, prefix: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(costs, made.scheduling, made.blocks, made.longest, [], admission_s=admission_s,
                         mixes=made.mixes)  # fmt: skip
        s = made.scheduling
        self.pool = ReplicaPool(made.blocks, s.block_size, s.share_prefixes, prefix)
        self.capacity = made.blocks * s.block_size
        """Tokens of the cache."""
        self.out = SimulationOutcome(shared.arrival, shared.first, shared.finish, shared.output)
        self.left = left
        self.pending = 0
        """Tokens of prompts that are not computed yet."""
        self.under_way: _Run | None = None
        self.version = 0
        """Raised whenever the end of the run under way changes."""

    def accept(self, job: FleetRequest) -> None:
        """Queue a request."""
        job.pending = max(0, job.tokens - job.kept - 1) if job.kept else job.tokens
        self.pending += job.pending
        self.waiting.append(job)
        self.fresh += 1

    def begin(self, now: float) -> float | None:
        """Begin the next iterations at ``now``; returns their end, or None if there is nothing to compute."""
        self.now = now
        while self.under_way is None:
            moved = None if self.limits.padded else self._together()
            if moved is None:
                moved = self._one_by_one()
            if not moved:
                return None
        return self._ends()

    def cut(self, now: float) -> float | None:
        """Shorten the run under way to the first of its iterations that ends at ``now`` or later; returns its new end,
        None if it stays as it is."""
        run = self.under_way
        if run is None or not run.cuttable or run.k == 1:
            return None
        k = until(now - self.now, run.each, run.slope, run.k)
        if k == run.k:
            return None
        run.k = k
        return self._ends()

    def end(self) -> None:
        """End the run under way."""
        run, self.under_way = self.under_way, None
        assert run is not None
        later, self.fresh = self.fresh, run.fresh
        self._spend(run.k, run.each, run.slope, run.prompts)
        self.fresh = later
        run.then(run.k)

    def stop(self, now: float) -> list[FleetRequest]:
        """Stop for good at ``now``, without the iteration under way; returns the requests that were here."""
        run = self.under_way
        if run is not None:
            whole = until(now - self.now, run.each, run.slope, run.k) - 1 if run.cuttable else 0
            if whole:
                run.k = whole
                self.end()
            self.under_way = None
        self.version += 1
        self._scatter()
        jobs = [job for job in (*self.running, *self.waiting) if isinstance(job, FleetRequest)]
        self.running, self.waiting, self.pending = {}, deque(), 0
        return jobs

    def _ends(self) -> float:
        run = self.under_way
        assert run is not None
        self.version += 1
        k = run.k
        seconds = k * run.each + run.slope * (k * (k - 1) / 2)  # as _spend adds them up
        return self.now + (seconds + run.fresh * self.admission_s)

    # ---- what differs from an engine by itself -----------------------------------------------------------------------

    def _iterate(
        self, prompts: list[tuple[int, int]], decoding: int, cached: int, most: int, pads: int, then: Then
    ) -> None:
        k, each, slope = self._length(prompts, decoding, cached, most, pads)
        cuttable = not prompts and self.limits.continuous and not self.waiting
        self.under_way = _Run(k, each, slope, prompts, self.fresh, then, cuttable)
        self.fresh = 0

    def _admit(self, plan: dict[SimulatedRequest, int], budget: int, alone: bool = True) -> None:
        before = self.admitted
        super()._admit(plan, budget, alone)
        for job in reversed(self.running) if self.admitted > before else ():
            if job.order < before:
                break
            assert isinstance(job, FleetRequest)
            job.since = self.now

    def _computed(self, job: SimulatedRequest, n: int) -> bool:
        assert isinstance(job, FleetRequest)
        if job.pending and job.computed + n >= job.tokens:
            self.pending -= job.pending
            job.pending = 0
        return super()._computed(job, n)

    def _leave(self, job: SimulatedRequest) -> None:
        assert isinstance(job, FleetRequest)
        del self.running[job]
        self.left(self, job)
