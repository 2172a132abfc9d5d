"""What the processes of one search share: the fastest plan, how far they are, and which nodes they have taken."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ridgeline.search.space import MICRO_BATCHES

if TYPE_CHECKING:
    from ridgeline.search.nodes import SearchNode, Shape

_LOOK = 0.2
"""Seconds between looks at how far the workers are."""

_PAUSE = 0.02
"""Seconds between looks for a node that another process has left."""


@dataclass
class Shared:
    """What the processes of a search know of each other, in shared memory."""

    fastest: Any
    """Weighed seconds of the fastest plan."""
    counts: Any
    """Nodes that were looked at, and of how many."""
    taken: Any
    """Of each node (:attr:`SearchNode.index`): whether a process has taken it."""
    bounds: Any
    """Weighed seconds that each node needs at least, as far as its process knows; NaN where it does not."""


_shared: list[Shared] = []
"""In a worker one, elsewhere none."""


def _share(*arrays: Any) -> None:
    _shared[:] = [Shared(*arrays)]


def fastest_of_all(seconds: float) -> float:
    """The least of ``seconds`` and what all processes have found, which becomes known to them."""
    for shared in _shared:
        with shared.fastest.get_lock():
            shared.fastest.value = seconds = min(seconds, shared.fastest.value)
    return seconds


def count_nodes(done: int, of: int) -> None:
    """Add to what all processes have done, and are to do."""
    for shared in _shared:
        with shared.counts.get_lock():
            shared.counts[0] += done
            shared.counts[1] += of


def take(node: SearchNode) -> bool:
    """Whether the node is the caller's to look at: no process has taken it."""
    for shared in _shared:
        with shared.taken.get_lock():
            if shared.taken[node.index]:
                return False
            shared.taken[node.index] = 1
    return True


def publish(node: SearchNode, bound: float) -> None:
    """Let others know the bound of a node."""
    for shared in _shared:
        shared.bounds[node.index] = bound


def left_by_others(theirs: list[SearchNode], reach: Callable[[], float]) -> Iterator[SearchNode]:
    """The nodes of another process that it has not taken, and whose bounds are known to be within ``reach()``, until it
    has none left: each time the one that it would come to last."""
    for shared in _shared:
        bounds, taken = shared.bounds, shared.taken.get_obj()
        while theirs := [n for n in theirs if not taken[n.index]]:
            limit = reach()
            last = max(theirs, key=lambda n: bounds[n.index] if bounds[n.index] <= limit else -1.0)
            if bounds[last.index] <= limit:
                yield last
            else:
                time.sleep(_PAUSE)


def divide(shapes: list[Shape], workers: int) -> list[list[Shape]]:
    """The shapes of each worker: those that differ in recomputation only stay together, as they share bounds. At
    random, as an order by any technique's choices would give one worker all that is slow with it."""
    groups: dict[object, list[Shape]] = {}
    for index, mesh, shape in shapes:
        rest = tuple(t for t in shape if t.phase != "recompute")
        groups.setdefault((index, mesh, rest), []).append((index, mesh, shape))
    order = list(groups.values())
    random.Random(0).shuffle(order)
    return [[s for group in order[i::workers] for s in group] for i in range(workers)]


def in_processes(
    run: Callable[[list[list[Shape]], int], Any], shapes: list[Shape], workers: int, say: Callable[[int, int], None]
) -> list[Any]:
    """What ``run`` finds in each of ``workers`` processes: it gets the shapes of all, and which of them are its own.
    Where the system kills one, all is done here; where one fails, the others end early."""
    fork, parts = get_context("fork"), divide(shapes, workers)
    size = len(shapes) * len(MICRO_BATCHES)
    counts, bounds = fork.Array("q", 2), fork.RawArray("d", size)
    bounds[:] = [math.nan] * size
    taken = fork.Array("b", size)
    shared = fork.Value("d", math.inf), counts, taken, bounds
    with ProcessPoolExecutor(workers, fork, _share, shared) as pool:
        jobs = [pool.submit(run, parts, i) for i in range(workers)]
        try:
            left = True
            while left:
                done, others = wait(jobs, _LOOK, FIRST_EXCEPTION)
                left = bool(others) and not any(job.exception() for job in done)
                say(*counts.get_obj())  # without the lock, which a worker that was killed may have
        finally:  # others would wait for the nodes of one that has failed, and go on after Ctrl-C
            taken.get_obj()[:] = [1] * size
    if any(isinstance(job.exception(), BrokenProcessPool) for job in jobs):
        return [run([shapes], 0)]
    return [job.result() for job in jobs]
