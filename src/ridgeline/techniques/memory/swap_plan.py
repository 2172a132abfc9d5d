"""Which tensors are swapped, and when: a simulator of copies on two streams, and three planners (numpy only).

SwapAdvisor (doi 10.1145/3373376.3378530) lets a genetic algorithm search the order of the operators, the memory pool of
each tensor, and what is swapped. Eager PyTorch fixes the first two (autograd's order, an allocator that splits blocks),
so only the choice of tensors and the time of each fetch are searched here. Operators run on one stream; copies out and
in have a stream each, first come first served. A swapped tensor is copied out after its last use before an idle gap and
must be back before the first use after it.

All units are seconds and bytes. Time is counted in operators, as in :mod:`ridgeline.nn.memory.timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Gap:
    """A tensor that may be swapped out between two operators that use it."""

    bytes: int
    last: int
    """Last operator that needs it before the gap: the copy out begins after it."""
    next: int
    """First operator that needs it again."""

    @property
    def idle(self) -> int:
        """Number of operators strictly inside the gap."""
        return self.next - self.last - 1


@dataclass(frozen=True)
class Problem:
    """A step: seconds of every operator, live bytes at each with no tensor swapped, and the gaps."""

    seconds: tuple[float, ...]
    live: tuple[int, ...]
    gaps: tuple[Gap, ...]
    budget: int
    bandwidth: float
    """Bytes/s of one direction."""

    @property
    def least(self) -> int:
        """Peak bytes with every tensor swapped out for the whole of its gap."""
        away = self._away([(g.last + 1, g.next) for g in self.gaps])
        return int((np.array(self.live) - away).max())

    def _away(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        change = np.zeros(len(self.seconds) + 1)
        for (start, end), g in zip(spans, self.gaps, strict=True):
            if end > start:
                change[start] += g.bytes
                change[end] -= g.bytes
        return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class SwapChoice:
    """For each gap the operator before which the copy back is issued; 0: the tensor is not swapped."""

    back: tuple[int, ...]

    @property
    def swapped(self) -> list[int]:
        """Indices of the gaps that are used."""
        return [i for i, b in enumerate(self.back) if b]


@dataclass
class Simulated:
    """The result of simulating a choice."""

    seconds: float
    stall: float
    """Seconds in which the operators wait for copies or for memory."""
    peak: int
    overflow: int
    """Bytes by which the budget is exceeded where waiting does not help; 0: the plan fits."""
    copied: int
    starts: list[float] = field(default_factory=list)
    out: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Gap → start and end of its copy out."""
    into: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Gap → when its memory is allocated again, and the end of its copy in."""

    @property
    def cost(self) -> tuple[int, float, int]:
        """Minimized lexicographically: excess over the budget, then stall, then bytes copied."""
        return self.overflow, self.stall, self.copied


def simulate(p: Problem, choice: SwapChoice) -> Simulated:
    """Simulate one step. A tensor's memory is freed when its copy out has ended, and allocated when its copy in is
    issued."""
    leaving: dict[int, list[int]] = {}
    coming: dict[int, list[int]] = {}
    needed: dict[int, list[int]] = {}
    for i in choice.swapped:
        leaving.setdefault(p.gaps[i].last, []).append(i)
        coming.setdefault(choice.back[i], []).append(i)
        needed.setdefault(p.gaps[i].next, []).append(i)
    s = Simulated(0.0, 0.0, 0, 0, 2 * sum(p.gaps[i].bytes for i in choice.swapped))
    now = out_free = in_free = 0.0
    away = 0
    pending: list[int] = []  # copies out in flight, in order
    for op, took in enumerate(p.seconds):
        start = now
        for i in coming.get(op, ()):
            if i in pending:  # it cannot come back before it has left
                start = max(start, s.out[i][1])
        while pending and s.out[pending[0]][1] <= start:
            away += p.gaps[pending.pop(0)].bytes
        back = sum(p.gaps[i].bytes for i in coming.get(op, ()))
        while p.live[op] - away + back > p.budget and pending:
            i = pending.pop(0)
            start = max(start, s.out[i][1])
            away += p.gaps[i].bytes
        while pending and s.out[pending[0]][1] <= start:
            away += p.gaps[pending.pop(0)].bytes
        away -= back
        for i in coming.get(op, ()):
            in_free = max(in_free, start) + p.gaps[i].bytes / p.bandwidth
            s.into[i] = start, in_free
        held = p.live[op] - away
        s.peak = max(s.peak, held)
        s.overflow = max(s.overflow, held - p.budget)
        for i in needed.get(op, ()):
            start = max(start, s.into[i][1])
        s.starts.append(start)
        now = start + took
        for i in leaving.get(op, ()):
            begin = max(out_free, now)
            out_free = begin + p.gaps[i].bytes / p.bandwidth
            s.out[i] = begin, out_free
            pending.append(i)
    s.seconds = now
    s.stall = max(0.0, now - sum(p.seconds))
    return s


def deadlines(p: Problem, choice: SwapChoice) -> dict[int, int]:
    """For each swapped gap the first operator that does not fit before its copy out has ended (copies end in order)."""
    coming: dict[int, int] = {}
    leaving: dict[int, list[int]] = {}
    for i in choice.swapped:
        coming[choice.back[i]] = coming.get(choice.back[i], 0) + p.gaps[i].bytes
        leaving.setdefault(p.gaps[i].last, []).append(i)
    out: dict[int, int] = {}
    pending: list[int] = []
    away = 0
    for op in range(len(p.seconds)):
        for i in [i for i in pending if choice.back[i] <= op]:  # copied out before it comes back
            for j in pending[: pending.index(i) + 1]:
                out[j] = op
                away += p.gaps[j].bytes
            del pending[: pending.index(i) + 1]
        back = coming.get(op, 0)
        while pending and p.live[op] - away + back > p.budget:
            out[pending[0]] = op
            away += p.gaps[pending.pop(0)].bytes
        away -= back
        pending += leaving.get(op, [])
    return out


PATIENCE = 6
"""Generations without improvement after which the genetic search ends."""

# ---- planners --------------------------------------------------------------------------------------------------------


def timed_back(p: Problem, swapped: Sequence[int], lead: Sequence[float] | None = None) -> SwapChoice:
    """Issue copies back just early enough to be hidden behind the operators before their use, memory permitting.

    Planned backwards from the last use: each takes the stream's time just before the one after it. ``lead`` scales the
    seconds that each is given (1: exactly what it needs).
    """
    begins = np.concatenate([[0.0], np.cumsum(p.seconds)])
    back = [0] * len(p.gaps)
    mine = set(swapped)
    held = np.array(p.live) - p._away([(g.last + 1, g.next) if i in mine else (0, 0) for i, g in enumerate(p.gaps)])
    busy = begins[-1]
    for i in sorted(swapped, key=lambda i: -p.gaps[i].next):
        g = p.gaps[i]
        due = min(begins[g.next], busy)
        busy = due - g.bytes / p.bandwidth
        at = due - (1.0 if lead is None else lead[i]) * g.bytes / p.bandwidth
        op = int(np.searchsorted(begins, max(at, 0.0), side="right")) - 1
        op = min(max(op, g.last + 2), g.next)
        early = g.next
        while early > op and held[early - 1] + g.bytes <= p.budget:
            early -= 1
        held[early : g.next] += g.bytes
        back[i] = early
    return SwapChoice(tuple(back))


def _until_it_fits(p: Problem, order: Sequence[int]) -> SwapChoice:
    """Swap in this order, skipping what relieves no operator that is over the budget, until every operator fits."""
    held = np.array(p.live, dtype=np.int64)
    chosen: list[int] = []
    for i in order:
        g = p.gaps[i]
        if (held > p.budget).any():
            inside = slice(g.last + 1, g.next)
            if (held[inside] > p.budget).any():
                held[inside] -= g.bytes
                chosen.append(i)
    return timed_back(p, chosen)


def greedy(p: Problem) -> SwapChoice:
    """Largest bytes × idle seconds first."""
    begins = np.concatenate([[0.0], np.cumsum(p.seconds)])
    worth = [g.bytes * (begins[g.next] - begins[g.last + 1]) for g in p.gaps]
    return _until_it_fits(p, sorted(range(len(p.gaps)), key=lambda i: -worth[i]))


def lru(p: Problem) -> SwapChoice:
    """LRU paging: at an operator over the budget the least recently used tensor is swapped out; it comes back on
    demand."""
    held = np.array(p.live, dtype=np.int64)
    gone: set[int] = set()
    for op in range(len(held)):
        while held[op] > p.budget:
            there = [i for i, g in enumerate(p.gaps) if i not in gone and g.last < op < g.next]
            if not there:
                break
            oldest = min(there, key=lambda i: p.gaps[i].last)
            gone.add(oldest)
            held[p.gaps[oldest].last + 1 : p.gaps[oldest].next] -= p.gaps[oldest].bytes
    return SwapChoice(tuple(g.next if i in gone else 0 for i, g in enumerate(p.gaps)))


def genetic(p: Problem, population: int = 24, generations: int = 30, seed: int = 0) -> SwapChoice:
    """The genetic search over what is swapped and how early it is fetched, started from the greedy and LRU plans.

    A genome gives each gap a priority and a lead; gaps are swapped by priority until the step fits. The best two always
    survive, so the result is never worse than the initial plans.
    """
    count = len(p.gaps)
    seeds = [greedy(p), lru(p), timed_back(p, range(count))]
    if not count or not simulate(p, SwapChoice((0,) * count)).overflow:
        return SwapChoice((0,) * count)
    rng = np.random.default_rng(seed)
    worth = np.zeros(count)
    for rank, i in enumerate(sorted(range(count), key=lambda i: -p.gaps[i].bytes * p.gaps[i].idle)):
        worth[i] = 1 - rank / count

    def express(genome: np.ndarray) -> SwapChoice:
        base = _until_it_fits(p, list(np.argsort(-genome[0], kind="stable")))
        return timed_back(p, base.swapped, list(genome[1]))

    def born() -> np.ndarray:
        return np.stack([worth + rng.normal(0, 0.3, count), rng.uniform(0.5, 4.0, count)])

    best = min(seeds, key=lambda c: simulate(p, c).cost)
    best_cost = simulate(p, best).cost
    genomes = [np.stack([worth, np.full(count, 1.0)]), np.stack([worth, np.full(count, 2.0)])]
    genomes += [born() for _ in range(population - 2)]
    idle = 0
    for _ in range(generations):
        before = best_cost
        ranked: list[tuple[tuple[int, float, int], int, np.ndarray]] = []
        for genome in genomes:
            choice = express(genome)
            cost = simulate(p, choice).cost
            ranked.append((cost, len(ranked), genome))
            if cost < best_cost:
                best, best_cost = choice, cost
        idle = 0 if best_cost < before else idle + 1
        if idle == PATIENCE:
            break
        ranked.sort(key=lambda r: r[:2])
        parents = [genome for _, _, genome in ranked[: max(2, population // 3)]]
        genomes = parents[:2]
        while len(genomes) < population:
            a, b = (parents[int(k)] for k in rng.integers(0, len(parents), 2))
            child = np.where(rng.random((1, count)) < 0.5, a, b)
            hit = rng.random(child.shape) < 0.15
            child = child + hit * rng.normal(0, [[0.3], [1.0]], child.shape)
            child[1] = np.clip(child[1], 0.0, 8.0)
            genomes.append(child)
    return _trimmed(p, best)


def _trimmed(p: Problem, choice: SwapChoice) -> SwapChoice:
    """The choice without the swaps that turn out to be unnecessary, largest first."""
    best, cost = choice, simulate(p, choice).cost
    for i in sorted(choice.swapped, key=lambda i: -p.gaps[i].bytes):
        fewer = SwapChoice(tuple(0 if k == i else b for k, b in enumerate(best.back)))
        found = simulate(p, fewer).cost
        if found < cost:
            best, cost = fewer, found
    return best


def exact(p: Problem, seconds: float = 20.0) -> float:
    """The least stall of any plan, by an integer program (HiGHS), for small problems: a lower bound for all planners.

    For every gap a window (freed before operator f, issued again before operator b) or none. A copy stream meets its
    deadlines when, in every interval, the work that must be done within it fits into the operators' seconds and stalls
    there (preemptive earliest-deadline scheduling, so that queues of the simulator are feasible too). Raises
    :class:`ValueError` when no plan fits the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    ops = len(p.seconds)
    windows = [
        (i, f, b) for i, g in enumerate(p.gaps) for f in range(g.last + 1, g.next) for b in range(f + 1, g.next + 1)
    ]
    rows: list[np.ndarray] = []
    most: list[float] = []
    width = len(windows) + ops

    def limit(row: np.ndarray, top: float) -> None:
        rows.append(row)
        most.append(top)

    for i in range(len(p.gaps)):
        limit(np.array([float(w[0] == i) for w in windows] + [0.0] * ops), 1.0)
    for op in range(ops):
        if p.live[op] > p.budget:
            away = [-float(p.gaps[i].bytes) if f <= op < b else 0.0 for i, f, b in windows]
            limit(np.array(away + [0.0] * ops), p.budget - p.live[op])
    sums = np.concatenate([[0.0], np.cumsum(p.seconds)])
    for out in (True, False):
        spans = [(p.gaps[i].last + 1, f) if out else (b, p.gaps[i].next) for i, f, b in windows]
        for a in sorted({s[0] for s in spans}):
            for z in sorted({s[1] for s in spans if s[1] >= a}):
                row = np.zeros(width)
                for k, ((i, _, _), (release, due)) in enumerate(zip(windows, spans, strict=True)):
                    if release >= a and due <= z:
                        row[k] = p.gaps[i].bytes / p.bandwidth
                row[len(windows) + a : len(windows) + z + 1] = -1.0  # including the stall before its due operator
                limit(row, float(sums[z] - sums[a]))
    cost = np.concatenate([np.zeros(len(windows)), np.ones(ops)])
    found = milp(
        cost,
        constraints=[LinearConstraint(np.array(rows), -np.inf, np.array(most))],
        integrality=np.concatenate([np.ones(len(windows)), np.zeros(ops)]),
        bounds=Bounds(0, np.concatenate([np.ones(len(windows)), np.full(ops, np.inf)])),
        options={"time_limit": seconds},
    )
    if found.x is None:
        raise ValueError("no plan holds the budget")
    return float(found.fun)
