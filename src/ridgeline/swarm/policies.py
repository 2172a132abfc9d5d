"""What servers and clients of a swarm decide: which blocks to serve, when to move, and which way to take.

Rules of Petals (arXiv:2209.01188, section 3.2, and its open implementation): a server takes the window of blocks that
is covered worst; it moves when that would raise the throughput of the swarm's bottleneck enough; a client takes the
shortest path through (server, block). Throughputs are in tokens/s, times in seconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

QUALITY = 0.75
"""A server moves if the bottleneck has less than this fraction of the throughput that it would have after moving."""
SWEEPS, PLAYED = 5, 64
"""Times that the others' moves are played through at most, and how many of the others: with thousands a sample will do,
for what matters is whether the bottleneck can be lifted at all."""
FEW = 1e-3
"""Relative throughput that does not count: a server does not move for rounding."""


@dataclass(frozen=True)
class Span:
    """A server as the policies see it: blocks ``start`` to ``stop``."""

    name: str
    start: int
    stop: int
    throughput: float
    """Tokens/s through all of its blocks."""
    delay: float = 0.0
    """Seconds to reach it and back."""
    load: float = 0.0
    """Sequences that it computes already."""

    @property
    def length(self) -> int:
        """Number of blocks."""
        return self.stop - self.start

    @property
    def block_seconds(self) -> float:
        """Seconds that a token takes in one block, behind the sequences that are there."""
        return (1 + self.load) / (self.throughput * self.length)


@dataclass(frozen=True)
class Hop:
    """A part of a way: blocks ``start`` to ``stop`` at one server."""

    name: str
    start: int
    stop: int


def coverage(spans: Iterable[Span], blocks: int) -> np.ndarray:
    """Throughput of every block: the sum over the servers that have it, [blocks]."""
    out = np.zeros(blocks)
    for s in spans:
        out[s.start : s.stop] += s.throughput
    return out


def choose_start(covered: np.ndarray, length: int) -> int:
    """First block of the window of ``length`` that is covered worst: its throughputs, sorted, are lexicographically
    smallest; of equal windows the first."""
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(covered, length), axis=1)
    return int(np.lexsort(windows.T[::-1])[0])  # the last key of lexsort is the primary one


def choose_move(
    spans: Sequence[Span], me: str, blocks: int, rng: random.Random, quality: float = QUALITY
) -> int | None:
    """The first block that server ``me`` should serve instead; None: it stays.

    It moves only if that, and what the others would then do by the same rule, raises the throughput of the worst
    covered block to more than 1/``quality`` of what it is, and never if some block would be without a server.
    """
    now = {s.name: s for s in spans}
    covered = coverage(spans, blocks)
    before = float(covered.min())
    mine = now[me]
    rest = covered - coverage([mine], blocks)
    if before > 0 and float(rest.min()) <= FEW * mine.throughput:
        return None  # it is the only one somewhere
    if before >= (quality - FEW) * float(covered.mean()):
        return None  # the mean is the most that any placement could give
    start = _moved(now, covered, me)
    if start == mine.start:
        return None
    others = sorted(now)
    order = rng.sample(others, min(PLAYED, len(others)))
    for _ in range(SWEEPS):
        rng.shuffle(order)
        if not sum(_moved(now, covered, name) != at for name, at in [(n, now[n].start) for n in order]):
            break
    after = float(covered.min())
    return start if after > 0 and before < (quality - FEW) * after else None


def _moved(now: dict[str, Span], covered: np.ndarray, name: str) -> int:
    """Move a server to its best window → its first block. Its own place wins where it is as good as another."""
    s = now[name]
    covered[s.start : s.stop] -= s.throughput * (1 + FEW)
    start = choose_start(covered, s.length)
    covered[s.start : s.stop] += s.throughput * FEW
    now[name] = moved = replace(s, start=start, stop=start + s.length)
    covered[moved.start : moved.stop] += s.throughput
    return start


def find_route(spans: Iterable[Span], start: int, stop: int) -> list[Hop] | None:
    """The fastest way from block ``start`` to ``stop``, by Dijkstra's algorithm over (block, server); None: there is
    none. Entering a server costs its delay, each of its blocks the seconds a token takes there."""
    known = list(spans)
    at: dict[int, list[int]] = {}
    for i, s in enumerate(known):
        for block in range(max(s.start, start), min(s.stop, stop)):
            at.setdefault(block, []).append(i)
    best: dict[tuple[int, int], float] = {}
    came: dict[tuple[int, int], tuple[int, int]] = {}
    outside = -1
    queue: list[tuple[float, int, int, tuple[int, int]]] = [(0.0, start, outside, (start, outside))]
    while queue:
        seconds, block, server, previous = heapq.heappop(queue)
        if (block, server) in best:
            continue
        best[block, server] = seconds
        came[block, server] = previous
        if block == stop:
            return _hops(known, came, (block, server), start)
        for i in at.get(block, ()):
            s = known[i]
            if (block + 1, i) not in best:
                enter = 0.0 if i == server else s.delay
                heapq.heappush(queue, (seconds + enter + s.block_seconds, block + 1, i, (block, server)))
    return None


def _hops(
    known: list[Span], came: dict[tuple[int, int], tuple[int, int]], last: tuple[int, int], start: int
) -> list[Hop]:
    """The way that ends at ``last``, consecutive blocks at one server joined."""
    hops: list[Hop] = []
    while last[0] > start:
        block, server = last
        name = known[server].name
        if hops and hops[-1].name == name:
            hops[-1] = replace(hops[-1], start=block - 1)
        else:
            hops.append(Hop(name, block - 1, block))
        last = came[last]
    return hops[::-1]


# ---- training: stages of a pipeline over unreliable peers (SWARM, arXiv:2301.11913) ---------------------------------


class Router:
    """Which peer of a stage gets the next micro-batch: interleaved weighted round-robin (section 3.2).

    Each peer stands in a queue at the time when it would be done; the first in the queue is taken and moves back by the
    seconds that it takes, an exponential mean. Banned peers stand in no queue.
    """

    FORGET = 0.2
    """Weight of the newest time in the mean."""

    def __init__(self, guess: float = 0.1) -> None:
        """``guess``: seconds that a new peer is assumed to take."""
        self.seconds: dict[str, float] = {}
        """Mean seconds that each peer takes."""
        self.taken: dict[str, int] = {}
        """Micro-batches that each peer was given."""
        self._guess = guess
        self._queue: list[tuple[float, int, str]] = []
        self._count = 0

    def add(self, peer: str) -> None:
        """A peer that was not there; it joins at the head of the queue, and counts as fast as the others are."""
        if any(p == peer for _, _, p in self._queue):
            return
        known = sorted(self.seconds[p] for _, _, p in self._queue)
        self.seconds.setdefault(peer, known[len(known) // 2] if known else self._guess)
        self._push(self._queue[0][0] if self._queue else 0.0, peer)

    def ban(self, peer: str) -> None:
        """Give it no more."""
        self._queue = [item for item in self._queue if item[2] != peer]
        heapq.heapify(self._queue)

    def pick(self) -> str | None:
        """The peer for the next micro-batch; None: there is none."""
        if not self._queue:
            return None
        due, _, peer = heapq.heappop(self._queue)
        self._push(due + self.seconds[peer], peer)
        self.taken[peer] = self.taken.get(peer, 0) + 1
        return peer

    def done(self, peer: str, seconds: float) -> None:
        """A micro-batch took so long."""
        self.seconds[peer] = (1 - self.FORGET) * self.seconds.get(peer, seconds) + self.FORGET * seconds

    def _push(self, due: float, peer: str) -> None:
        self._count += 1  # of equal times the first comes first
        heapq.heappush(self._queue, (due, self._count, peer))


def choose_stage(rates: Sequence[Iterable[float]]) -> int:
    """The stage that a new peer should join: that with the lowest sum of its peers' rates (micro-batches/s)."""
    sums = [sum(stage) for stage in rates]
    return sums.index(min(sums))


def choose_migration(rates: Sequence[dict[str, float]], quality: float = QUALITY) -> tuple[str, int] | None:
    """(peer, stage) if moving a peer to the slowest stage makes the pipeline faster; None: all stay (section 3.3).

    ``rates``: micro-batches/s of each stage's peers. The slowest peer goes that can be spared by the fastest stage; it
    must raise the rate of the slowest stage of all, by more than 1/``quality``. No stage is left without peers.
    """
    sums = [sum(stage.values()) for stage in rates]
    slow = sums.index(min(sums))
    found: tuple[float, str] | None = None
    for i, stage in enumerate(rates):
        if i == slow or len(stage) < 2:
            continue
        for peer, rate in stage.items():
            left = [sums[k] - rate if k == i else sums[k] + rate if k == slow else sums[k] for k in range(len(sums))]
            if found is None or (min(left), peer) > found:
                found = min(left), peer
    if found is None or min(sums) >= (quality - FEW) * found[0]:
        return None
    return found[1], slow
