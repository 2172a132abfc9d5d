"""Requests and their arrival times: a renewal process, a closed loop, or a recorded trace."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, NamedTuple

from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import Serve


class Arrival(NamedTuple):
    """One request: arrival time in seconds, prompt tokens, tokens to generate (at least one)."""

    arrival: float
    prompt: int
    output: int


REQUESTS = 1000
"""Simulated where a workload does not say how many."""


def requests(w: Serve) -> list[Arrival]:
    """The workload's requests in order of arrival; in a closed loop only the first ``concurrency`` times are final.

    Raises :class:`UserError` for a trace that cannot be read.
    """
    rng = random.Random(w.seed)
    if w.trace:
        found = read_trace(Path(w.trace), w.requests)
        scale = 1.0 if w.rate is None else arrival_rate(found) / w.rate  # a given rate rescales the trace
        return [Arrival(r.arrival * scale, r.prompt, r.output) for r in found]
    count = w.requests or REQUESTS
    if w.concurrency is not None:
        return [Arrival(0.0, *_lengths(w, rng)) for _ in range(count)]
    now, out = 0.0, []
    rate = w.offered or 1.0
    for _ in range(count):
        now += rng.gammavariate(w.burstiness, 1.0 / (w.burstiness * rate))
        out.append(Arrival(now, *_lengths(w, rng)))
    return out


class Arrivals:
    """Requests on their way to an engine, which they reach ``request_s`` after they were sent; those that are not
    ``accepted`` are rejected. ``concurrency`` closes the loop: a client sends its next request when the previous one is
    answered."""

    def __init__(
        self, requests: Sequence[Arrival], concurrency: int | None, request_s: float,
        accepted: Callable[[Arrival], bool],
    ) -> None:  # fmt: skip
        self.requests, self.request_s, self.accepted = requests, request_s, accepted
        self.closed = concurrency is not None
        self.upcoming = self.refused = 0
        self.sent = [math.nan] * len(requests)
        """Time at which each request was sent."""
        self._due: list[tuple[float, int]] = []
        for _ in range(concurrency or 0):
            self.answered(0.0)

    @property
    def next(self) -> float:
        """When the next request reaches the engine; infinite if there is none."""
        if self.closed:
            return self._due[0][0] + self.request_s if self._due else math.inf
        if self.upcoming < len(self.requests):
            return self.requests[self.upcoming].arrival + self.request_s
        return math.inf

    def until(self, now: float) -> Iterator[int]:
        """The requests that have reached the engine since the last call."""
        while self.next <= now:
            if self.closed:
                yield heappop(self._due)[1]
            else:
                i = self.upcoming
                self.upcoming += 1
                if self._accepted(i, self.requests[i].arrival):
                    yield i

    def answered(self, at: float) -> None:
        """A client of a closed loop sends its next request, and another one if that is rejected."""
        while self.closed and self.upcoming < len(self.requests):
            i = self.upcoming
            self.upcoming += 1
            if self._accepted(i, at):
                heappush(self._due, (at, i))
                return

    def _accepted(self, i: int, at: float) -> bool:
        self.sent[i] = at
        fits = self.accepted(self.requests[i])
        self.refused += not fits
        return fits


def _lengths(w: Serve, rng: random.Random) -> tuple[int, int]:
    def draw(mean: int, cv: float) -> int:
        if not cv:
            return mean
        if w.length_shape == "lognormal":
            log_variance = math.log1p(cv * cv)
            drawn = rng.lognormvariate(math.log(mean) - log_variance / 2, log_variance**0.5)
        elif w.length_shape == "uniform":
            drawn = mean + 3**0.5 * cv * mean * (2 * rng.random() - 1)
        else:
            shape = cv**-2
            drawn = rng.gammavariate(shape, mean / shape)
        return max(1, min(round(drawn), 20 * mean))

    return draw(w.prompt_len, w.length_cv), draw(w.output_len, w.length_cv if w.output_cv is None else w.output_cv)


def arrival_rate(found: list[Arrival]) -> float:
    """Requests per second; 1 of those that arrive at once."""
    span = found[-1].arrival - found[0].arrival
    return (len(found) - 1) / span if span > 0 else 1.0


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """A trace file, gzipped or not: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (AzurePublicDataset), or JSON
    lines with timestamp (ms), input_length, output_length (Mooncake). Times are shifted to start at zero."""
    try:
        with _open(path) as f:
            rows = _json_lines(f) if ".jsonl" in path.name else _csv_rows(f)
            found = []
            for r in rows:
                found.append(r)
                if limit and len(found) >= limit:
                    break
    except OSError as e:
        raise UserError(
            f"cannot read trace {path}: {e.strerror or e}", "give a .csv or .jsonl file, or its .gz"
        ) from None
    except (KeyError, ValueError, TypeError) as e:
        raise UserError(
            f"trace {path} has a line that is not a request: {e}",
            "CSV needs TIMESTAMP,ContextTokens,GeneratedTokens; JSON lines timestamp, input_length, output_length",
        ) from None
    if not found:
        raise UserError(f"trace {path} holds no request", "give a file with at least one line after the header")
    found.sort()
    start = found[0].arrival
    return [Arrival(r.arrival - start, r.prompt, r.output) for r in found]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _csv_rows(f: IO[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(f):
        stamp = row["TIMESTAMP"][:26]  # microseconds: Python parses no finer resolution
        at = datetime.fromisoformat(stamp).timestamp()
        yield Arrival(at, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))


def _json_lines(f: IO[str]) -> Iterator[Arrival]:
    for line in f:
        if line.strip():
            row = json.loads(line)
            yield Arrival(row["timestamp"] / 1e3, max(1, int(row["input_length"])), max(1, int(row["output_length"])))
