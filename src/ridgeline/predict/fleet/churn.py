"""Replicas that come and go: autoscaling and interruptions."""

from __future__ import annotations

import math
import random
from collections import deque

from ridgeline.predict.fleet.members import Member, PoolModel
from ridgeline.predict.fleet.simulation import FleetSimulation
from ridgeline.spec.fleet import Autoscale, Spot


class Churn:
    """Changes a simulated fleet as its pools' rules say."""

    def __init__(self, sim: FleetSimulation) -> None:
        self.sim = sim
        self.random = random.Random(sim.spec.fleet.seed)

    def begin(self) -> None:
        """Start the rules' clocks."""
        for model in self.sim.models:
            if (rule := model.pool.autoscale) is not None:
                _Scaler(self, model, rule).begin()
            if model.pool.spot is not None:
                for m in list(self.sim.members):
                    if m.model is model:
                        self.expect(m, model.pool.spot)

    def added(self, m: Member) -> None:
        """A replica came."""
        if (spot := m.model.pool.spot) is not None:
            self.expect(m, spot)

    def expect(self, m: Member, spot: Spot) -> None:
        """Draw when a replica is interrupted, and what follows."""
        sim = self.sim
        after = self.random.expovariate(spot.interruptions_per_hour / 3600)

        def warned() -> None:
            if m.state in ("draining", "gone"):  # it is being given back
                return
            sim.drain(m)
            sim.at(sim.now + min(after, spot.notice_s), interrupted)

        def interrupted() -> None:
            if m.state != "gone":
                sim.lose(m)
            self.added(sim.add(m.model, spot.restart_s))

        sim.at(sim.now + max(0.0, after - spot.notice_s), warned)


class _Scaler:
    """One pool's autoscaling."""

    def __init__(self, churn: Churn, model: PoolModel, rule: Autoscale) -> None:
        self.churn, self.sim, self.model, self.rule = churn, churn.sim, model, rule
        self.wishes: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        for _ in range(self.rule.min - (self.model.pool.replicas or 0)):
            self.churn.added(self.sim.add(self.model))
        self.sim.at(self.sim.now + self.rule.interval_s, self.decide)

    def decide(self) -> None:
        """Compute the number of replicas from the requests per replica, and add or drain some."""
        sim, rule = self.sim, self.rule
        active = [m for m in sim.members if m.model is self.model and m.state in ("up", "starting")]
        load = sum(m.requests for m in active) + len(sim.held)
        wish = min(rule.max, max(rule.min, math.ceil(load / rule.target)))
        self.wishes.append((sim.now, wish))
        while self.wishes[0][0] < sim.now - rule.down_after_s:
            self.wishes.popleft()
        most = max(n for _, n in self.wishes)
        for _ in range(wish - len(active)):
            self.churn.added(sim.add(self.model, rule.start_s))
        for m in sorted(active, key=lambda m: (m.state == "up", m.requests, -m.number))[: max(0, len(active) - most)]:
            sim.drain(m)
        sim.at(sim.now + rule.interval_s, self.decide)
