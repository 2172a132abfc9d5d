"""How many replicas of each pool a fleet needs, at least cost or power, to serve a trace within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from ridgeline.predict.fleet.members import PoolModel
from ridgeline.predict.fleet.predict_fleet import fleet_metrics, model_of, predict_fleet, simulate_fleet
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.simulate import latencies_of
from ridgeline.search.question import HIGHER
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.fleet import FleetSpec
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve

Goal = Literal["cost", "power"]
Counts = tuple[int, ...]
MOST = 1024
"""Replicas of one pool at most."""


@dataclass(frozen=True)
class Sized:
    """A fleet that keeps the limits, or the largest tried that does not."""

    spec: FleetSpec
    result: Result
    missed: tuple[str, ...]
    """The limits that even :data:`MOST` replicas of each pool break, in words; empty: it keeps all."""
    tried: int
    """Number of fleets simulated."""


def size_fleet(
    spec: FleetSpec, experiments: Mapping[str, Experiment], slo: Mapping[str, float], goal: Goal, most: int = MOST
) -> Sized:
    """The cheapest sizes of the pools without ``replicas``, of which more are taken to be never worse.

    ``slo``: limits on the fleet's metrics. Raises :class:`UserError` if all pools have a size, or without a limit.
    """
    open_ = [p.name for p in spec.pools if p.replicas is None and p.autoscale is None]
    if not open_:
        raise UserError("every pool of the fleet has its number of replicas", "leave `replicas` out of those to size")
    if not slo:
        raise UserError("a fleet is sized for limits, and there are none", "add e.g. --slo ttft_p99_s=2")
    w = next(iter(experiments.values())).workload
    assert isinstance(w, Serve)
    if w.concurrency is not None:
        raise UserError("clients that wait for their answers send less to a slower fleet", "give --rate or --arrivals")
    arrivals = requests(w)
    models = [model_of(p, spec, experiments[p.name], arrivals) for p in spec.pools]
    prices = _prices([m for m in models if m.pool.name in open_], goal)

    def missed(counts: Counts) -> list[str]:
        sized = spec.sized(dict(zip(open_, counts, strict=True)))
        now = [m._replace(pool=p) for m, p in zip(models, sized.pools, strict=True)]
        outcome = simulate_fleet(sized, now, w, arrivals)
        if outcome.requests.rejected == len(arrivals):
            return ["no replica has room for the shortest request"]
        found = fleet_metrics(outcome, now, w, latencies_of(outcome.requests))
        return _missed({name: m.value for name, m in found.items()}, slo)

    search = Search(len(open_), lambda c: sum(n * x for n, x in zip(c, prices, strict=True)), missed, most)
    counts = search.cheapest()
    why = () if counts is not None else tuple(search.why)
    sized = spec.sized(dict(zip(open_, counts or (most,) * len(open_), strict=True)))
    return Sized(sized, predict_fleet(sized, experiments), why, search.tried)


def _prices(models: list[PoolModel], goal: Goal) -> list[float]:
    """What one replica of each pool costs; devices where prices or watts are not known."""
    found = [m.price_per_hour if goal == "cost" else m.watts for m in models]
    return found if all(found) else [float(m.devices) for m in models]


def _missed(metrics: Mapping[str, float], slo: Mapping[str, float]) -> list[str]:
    found = []
    for name, limit in slo.items():
        if name not in metrics:
            raise unknown("metric", name, metrics, "slo")
        if (metrics[name] < limit) if name in HIGHER else (metrics[name] > limit):
            side = "below" if name in HIGHER else "above"
            found.append(f"{name} {metrics[name]:.4g} {side} the limit {limit:.4g}")
    return found


class Search:
    """The cheapest counts that miss nothing, of ``n`` pools with 1 to ``most`` replicas each, if more replicas never
    miss more. ``why`` is what the largest fleet misses."""

    def __init__(
        self, n: int, price: Callable[[Counts], float], missed: Callable[[Counts], list[str]], most: int = MOST
    ) -> None:
        self.n, self.price, self.missed, self.most = n, price, missed, most
        self.good: list[Counts] = []
        self.bad: list[Counts] = []
        self.why: list[str] = []
        self.tried = 0

    def cheapest(self) -> Counts | None:
        """The counts, or None. All pools are doubled until the limits are kept, which bounds the price, and so every
        pool from above; then each is shrunk while the others stay at their bounds, which bounds it from below; from
        there up, fleets are tried in the order of their price."""
        n = 1
        while not self._enough((n,) * self.n):
            if n >= self.most:
                return None
            n = min(self.most, 2 * n)
        top = self._affordable(self.price((n,) * self.n))
        least = tuple(self._bound(i, top) for i in range(self.n))
        queue, seen = [(self.price(least), least)], {least}
        while True:
            _, counts = heappop(queue)
            if self._enough(counts):
                return counts
            for i in range(self.n):
                more = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                if more[i] <= top[i] and more not in seen:
                    seen.add(more)
                    heappush(queue, (self.price(more), more))

    def _affordable(self, price: float) -> Counts:
        """The most of each pool with one of each other, for ``price``."""
        one = (1,) * self.n
        found = []
        for i in range(self.n):
            each = self.price((*one[:i], 2, *one[i + 1 :])) - self.price(one)
            found.append(min(self.most, 1 + int((price - self.price(one)) / each * (1 + 1e-9))))
        return tuple(found)

    def _bound(self, i: int, top: Counts) -> int:
        """The fewest replicas of pool ``i`` that are enough with ``top`` of all others."""
        low, high = 0, top[i]
        while high - low > 1:
            middle = (low + high) // 2
            counts = (*top[:i], middle, *top[i + 1 :])
            low, high = (low, middle) if self._enough(counts) else (middle, high)
        return high

    def _enough(self, counts: Counts) -> bool:
        if any(_covers(counts, known) for known in self.good):
            return True
        if any(_covers(known, counts) for known in self.bad):
            return False
        self.tried += 1
        why = self.missed(counts)
        if why:
            self.why = why
        (self.bad if why else self.good).append(counts)
        return not why


def _covers(larger: Counts, smaller: Counts) -> bool:
    return all(a >= b for a, b in zip(larger, smaller, strict=True))
