"""Thousands of servers that join, differ, move and vanish: the policies of :mod:`.policies` in a simulation.

What is simulated is placement and routing, event by event; a token's time is that of its way (:func:`find_route`). What
is not: queues at servers beyond the sequences that each computes already, and the transfer of weights.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from statistics import median

from ridgeline.swarm.policies import Span, choose_move, choose_start, coverage, find_route


@dataclass(frozen=True)
class Crowd:
    """Servers as they come; times in seconds."""

    servers: int = 1000
    """Mean number that are there."""
    lifetime: float = 4 * 3600.0
    """Mean time that a server stays (exponential)."""
    throughput: float = 100.0
    """Median tokens/s of a server through its blocks (log-normal)."""
    spread: float = 0.7
    """Standard deviation of the logarithm of throughputs, and of delays."""
    delay: float = 0.08
    """Median seconds to a server and back (log-normal)."""
    share: tuple[float, float] = (0.05, 0.3)
    """Part of the model's blocks that a server holds, at least and at most."""


@dataclass
class Simulated:
    """What happened."""

    covered: float = 0.0
    """Share of the time in which every block had a server."""
    bottleneck: list[float] = field(default_factory=list)
    """Throughput of the worst covered block over the mean block, at each sample."""
    token_s: list[float] = field(default_factory=list)
    """Seconds of a token on the fastest way, at each sample that has one."""
    hops: list[int] = field(default_factory=list)
    """Servers on that way."""
    joined: int = 0
    left: int = 0
    moved: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of one sequence, the median over samples; 0: there was never a way."""
        return 1 / median(self.token_s) if self.token_s else 0.0


def simulate(
    blocks: int, crowd: Crowd, seconds: float, balance_every: float = 120.0, placed: bool = True, seed: int = 0
) -> Simulated:
    """``seconds`` of a swarm with a model of ``blocks`` blocks. ``balance_every``: 0: servers never move; ``placed``:
    False: they choose blocks at random, for comparison."""
    rng, out = random.Random(seed), Simulated()
    now_there: dict[str, Span] = {}
    events: list[tuple[float, int, str, str]] = []
    count = 0

    def later(at: float, what: str, who: str) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, what, who))

    def join(at: float) -> None:
        out.joined += 1
        name = f"{out.joined:06d}"
        length = max(1, round(blocks * rng.uniform(*crowd.share)))
        start = choose_start(coverage(now_there.values(), blocks), length) if placed else rng.randrange(
            blocks - length + 1
        )  # fmt: skip
        throughput = crowd.throughput * rng.lognormvariate(0, crowd.spread)
        delay = crowd.delay * rng.lognormvariate(0, crowd.spread)
        now_there[name] = Span(name, start, start + length, throughput, delay)
        later(at + rng.expovariate(1 / crowd.lifetime), "leave", name)
        if balance_every and placed:
            later(at + balance_every * rng.uniform(0.5, 1.5), "balance", name)

    for _ in range(crowd.servers):
        join(0.0)
    every = seconds / 100
    later(every, "sample", "")
    later(rng.expovariate(crowd.servers / crowd.lifetime), "join", "")
    samples = whole = 0
    while events:
        at, _, what, who = heapq.heappop(events)
        if at > seconds:
            break
        if what == "join":
            join(at)
            later(at + rng.expovariate(crowd.servers / crowd.lifetime), "join", "")
        elif what == "leave":
            del now_there[who]
            out.left += 1
        elif what == "balance" and who in now_there:
            start = choose_move(list(now_there.values()), who, blocks, rng)
            if start is not None:
                now_there[who] = replace(now_there[who], start=start, stop=start + now_there[who].length)
                out.moved += 1
            later(at + balance_every * rng.uniform(0.5, 1.5), "balance", who)
        elif what == "sample":
            samples += 1
            whole += _sample(out, now_there, blocks)
            later(at + every, "sample", "")
    out.covered = whole / max(1, samples)
    return out


def _sample(out: Simulated, there: dict[str, Span], blocks: int) -> bool:
    """Note how the swarm is now → whether every block has a server."""
    covered = coverage(there.values(), blocks)
    out.bottleneck.append(float(covered.min() / covered.mean()) if covered.any() else 0.0)
    way = find_route(there.values(), 0, blocks)
    if way is None:
        return False
    out.token_s.append(sum(there[h.name].delay + (h.stop - h.start) * there[h.name].block_seconds for h in way))
    out.hops.append(len(way))
    return True
