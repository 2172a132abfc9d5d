"""The simulation's interfaces, and the closed form of a run of equal decode iterations.

Between events (an arrival that can start, a finish, a full cache) decode iterations differ only in the number of cached
tokens, which grows by one per sequence: such a run is one event, with its time as a sum in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


class Costs(Protocol):
    """What the scheduler needs from the cost model (:class:`ridgeline.predict.serving.iteration_time.Iterations`)."""

    def decode(self, n: int) -> tuple[float, float]:
        """(a, b): ``n`` sequences get one token each in a + b · cached tokens GPU seconds."""

    def between(self, n: int) -> float:
        """Seconds added to the time of each token."""

    def floor(self, n: int) -> float:
        """Minimum GPU seconds per token: the time of parallel host work."""

    def mixed(self, prompts: list[tuple[int, int]], n: int, cached: int, pads: int = 0) -> float:
        """Seconds of an iteration with prompt chunks and rows of padding."""


@dataclass(slots=True)
class SimulationOutcome:
    """Per request, by index: times of arrival, first token and finish (nan: rejected); and aggregates over the run."""

    arrival: list[float]
    first: list[float]
    finish: list[float]
    output: list[int]
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens): inter-token latencies, as (mean of a run of iterations, tokens in it)."""
    preemptions: int = 0
    iterations: int = 0
    prompt_iterations: int = 0
    """Those that read prompts, in pieces of two tokens or more."""
    prompt_tokens: int = 0
    """Tokens of these pieces."""
    cached_tokens: int = 0
    """Prompt tokens that requests found in the cache when they were admitted."""
    busy_s: float = 0.0
    rejected: int = 0


def decode_iterations(costs: Costs, n: int, cached: int, most: int) -> tuple[int, float, float]:
    """(iterations, seconds of the first, increase in seconds from each to the next) of up to ``most`` decode iterations
    of ``n`` sequences with ``cached`` tokens in total."""
    a, b = costs.decode(n)
    between, host = costs.between(n), costs.floor(n)
    first = a + b * cached
    if host > first:  # the host is slower than the GPU until the cache has grown
        grow = math.ceil((host - first) / (b * n)) if b else most
        return max(1, min(most, grow)), host + between, 0.0
    return most, first + between, b * n


def until(wait: float, per: float, slope: float, most: int) -> int:
    """The smallest number of iterations that take ``wait`` seconds or longer, each ``slope`` longer than the one
    before; at least 1, at most ``most``."""

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
