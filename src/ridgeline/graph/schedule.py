"""Pipeline schedules as lists of actions, and their timing.

A *virtual stage* is one consecutive part of the model; with c chunks on each of p ranks there are c·p of them, and rank
r holds r, r + p, r + 2p, … Every rank processes its list in order; a forward waits for the previous virtual stage, a
backward for the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]
"""Forward; backward (of the inputs only, where W follows); gradients of the weights."""


class Action(NamedTuple):
    """One pass of one micro-batch through one virtual stage."""

    kind: Kind
    stage: int
    micro: int


@dataclass(slots=True, frozen=True)
class ScheduleTimes:
    """The timing of a schedule."""

    seconds: float
    """When the last action ends."""
    ends: tuple[float, ...]
    """When each rank's last action ends."""
    busy: tuple[float, ...]
    """Seconds in which each rank is busy."""
    starts: tuple[tuple[tuple[Action, float], ...], ...] = ()
    """Per rank, every action with its start; empty where the steady state was extrapolated."""


def idle_share(schedule: str, ranks: int, micros: int, chunks: int = 1) -> float:
    """Idle time of a rank relative to its work if all stages take equally long and communication is free
    (arXiv:2104.04473, section 2.2); for zero_bubble a lower bound."""
    return 0.0 if schedule == "zero_bubble" else (ranks - 1) / (micros * chunks)


@lru_cache(maxsize=4096)
def actions(schedule: str, rank: int, ranks: int, micros: int, chunks: int = 1) -> tuple[Action, ...]:
    """The actions of one rank, in order.

    gpipe: arXiv:1811.06965; 1f1b and interleaved: arXiv:2104.04473, figure 4; zero_bubble: ZB-H1 of arXiv:2401.10241,
    where rank r delays r weight gradients, so that all ranks hold as much as the first one does under 1f1b.
    """
    if schedule == "interleaved":
        return _interleaved(rank, ranks, micros, chunks)
    if schedule == "gpipe":
        forward = [Action("F", rank, i) for i in range(micros)]
        return (*forward, *(Action("B", rank, i) for i in range(micros)))
    out: list[Action] = []
    split = schedule == "zero_bubble"
    warm = min(micros, ranks - rank - 1)
    out += [Action("F", rank, i) for i in range(warm)]
    for i in range(micros):
        if warm + i < micros:
            out.append(Action("F", rank, warm + i))
        out.append(Action("B", rank, i))
        if split and i >= rank:
            out.append(Action("W", rank, i - rank))
    if split:
        out += [Action("W", rank, i) for i in range(max(0, micros - rank), micros)]
    return tuple(out)


def _interleaved(rank: int, ranks: int, micros: int, chunks: int) -> tuple[Action, ...]:
    total, group = micros * chunks, ranks * chunks

    def at(k: int, backward: bool) -> Action:
        chunk = k % group // ranks
        micro = k // group * ranks + k % ranks
        if backward:
            return Action("B", (chunks - 1 - chunk) * ranks + rank, micro)
        return Action("F", chunk * ranks + rank, micro)

    warm = min(total, (ranks - rank - 1) * 2 + (chunks - 1) * ranks)
    out = [at(k, False) for k in range(warm)]
    for k in range(total):
        if warm + k < total:
            out.append(at(warm + k, False))
        out.append(at(k, True))
    return tuple(out)


@lru_cache(maxsize=1024)
def in_flight(schedule: str, rank: int, ranks: int, micros: int, chunks: int = 1) -> float:
    """Maximum number of micro-batches whose activations a rank holds, in units of all its chunks."""
    if schedule != "gpipe":  # what is in flight no longer grows once the pipeline is full
        micros = min(micros, 2 * ranks)
    held = most = 0
    split = schedule == "zero_bubble"  # then the gradients of the weights read what forward saved, later
    change = {"F": 1, "B": 0 if split else -1, "W": -1}
    for action in actions(schedule, rank, ranks, micros, chunks):
        held += change[action.kind]
        most = max(most, held)
    return most / chunks


@lru_cache(maxsize=1024)
def gathers(schedule: str, ranks: int, micros: int, chunks: int = 1) -> float:
    """How often a sharded layer is gathered in a step if every forward pass frees it again; the mean over ranks.

    It is gathered when the step begins, and stays after a backward pass until the next forward.
    """
    total = 0
    for rank in range(ranks):
        there = dict.fromkeys(range(rank, ranks * chunks, ranks), True)
        total += len(there)
        for action in actions(schedule, rank, ranks, micros, chunks):
            if action.kind != "W":
                total += not there[action.stage]
                there[action.stage] = action.kind == "B"
    return total / (ranks * chunks)


def run(
    schedule: str,
    ranks: int,
    micros: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    weight: tuple[float, ...] = (),
    send: float = 0.0,
    chunks: int = 1,
    exact: bool = False,
) -> ScheduleTimes:
    """Time a schedule from each virtual stage's seconds of forward, backward and (zero_bubble) weight gradients.

    A transfer between neighboring ranks takes ``send`` seconds. Many micro-batches are not simulated one by one: once
    the pipeline is full, each costs the same, which is derived from two shorter runs (``exact`` simulates all).
    """
    first = 2 * ranks + micros % ranks
    if exact or micros <= first + ranks:
        return _play(schedule, ranks, micros, forward, backward, weight, send, chunks, exact)
    a = _play(schedule, ranks, first, forward, backward, weight, send, chunks, False)
    if schedule == "gpipe":  # each direction is limited by its own slowest stage
        each = max(forward) + max(backward)
    else:
        b = _play(schedule, ranks, first + ranks, forward, backward, weight, send, chunks, False)
        each = max(b.seconds - a.seconds, max(b.busy) - max(a.busy)) / ranks
    more = (micros - first) * each
    return ScheduleTimes(a.seconds + more, tuple(x + more for x in a.ends), tuple(x * micros / first for x in a.busy))


_Step = tuple[int, int, int, bool]
"""One action of a whole pipeline, in an order in which everything that it waits for comes before it: its rank; the
index of its duration among those of forward, backward and weight gradients of every stage, one after another; the
place, in this order and from 1, of the action it waits for, 0: none; whether that comes from another rank. Plain
tuples, which Python unpacks faster than named ones, as a prediction goes through hundreds."""


@lru_cache(maxsize=128)
def _order(schedule: str, ranks: int, micros: int, chunks: int) -> tuple[tuple[_Step, ...], tuple[Action, ...]]:
    """The actions of all ranks in an order in which one pass times the schedule, for any durations."""
    stages = ranks * chunks
    last = stages - 1
    plans = [actions(schedule, r, ranks, micros, chunks) for r in range(ranks)]
    at = [0] * ranks
    place: dict[Action, int] = {}
    order: list[_Step] = []
    waiting = deque(range(ranks))
    while waiting:
        r = waiting.popleft()
        before = at[r]
        while at[r] < len(plans[r]):
            action = plans[r][at[r]]
            kind, stage, micro = action
            need, sent = 0, False
            if kind == "F" and stage:
                need, sent = place.get(Action("F", stage - 1, micro), -1), True
            elif kind == "B":
                sent = stage < last
                need = place.get(Action("B", stage + 1, micro) if sent else Action("F", stage, micro), -1)
            if need == -1:
                break
            place[action] = len(order) + 1
            order.append((r, stage + stages * "FBW".index(kind), need, sent))
            at[r] += 1
        if at[r] > before and ranks > 1:
            waiting.extend(x for x in {(r + 1) % ranks, (r - 1) % ranks} if at[x] < len(plans[x]))
    return tuple(order), tuple(place)


def _play(
    schedule: str,
    ranks: int,
    micros: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    weight: tuple[float, ...],
    send: float,
    chunks: int,
    record: bool,
) -> ScheduleTimes:
    order = _order.__wrapped__ if record else _order
    steps, acts = order(schedule, ranks, micros, chunks)
    durations = (*forward, *backward, *(weight or (0.0,) * len(forward)))
    clock = [0.0] * ranks
    done = [-send]  # the end of every action; what waits for none waits for the first
    wait = (0.0, send)
    for r, duration, need, sent in steps:
        now, ready = clock[r], done[need] + wait[sent]
        if ready > now:
            now = ready
        clock[r] = now = now + durations[duration]
        done.append(now)
    starts: list[list[tuple[Action, float]]] = [[] for _ in range(ranks)]
    if record:
        for (r, duration, _, _), action, end in zip(steps, acts, done[1:], strict=True):
            starts[r].append((action, end - durations[duration]))
    busy = [0.0] * ranks
    for stage in range(len(forward)):
        busy[stage % ranks] += micros * (
            forward[stage] + backward[stage] + (weight[stage] if schedule == "zero_bubble" else 0.0)
        )
    return ScheduleTimes(max(clock), tuple(clock), tuple(busy), tuple(tuple(s) for s in starts) if record else ())
