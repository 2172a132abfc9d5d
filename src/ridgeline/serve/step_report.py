"""What a step of the engine has done, and its form as bytes between the engine's process and the server's.

The layout is fixed but for what is rare. After the header come the requests' names, joined by zero bytes; then arrays
of int64 (an event's columns one after the other, its tokens, the integers of its log-probabilities) and of float64 (the
log-probabilities); last, pickled, what few events have: errors, embeddings, the prompt's log-probabilities.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from ridgeline.serve.request import Finish, OutputEvent, Stats, TokenLogprob

_FINISHES: tuple[Finish | None, ...] = (None, "stop", "length", "abort", "error", "tool_calls")
_CODES = {finish: i for i, finish in enumerate(_FINISHES)}
_COUNTERS = tuple(f.name for f in fields(Stats))
_HEAD = struct.Struct(f"<q??dd7q{len(_COUNTERS)}q")
_COLUMNS = 7
"""Of an event: which output, tokens, log-probabilities (-1: not wanted), finish, stop token (-1: none), cached tokens,
preemptions."""
_RARE = ("stop_string", "error", "prompt_logprobs", "embedding", "score", "unstructured")


@dataclass(slots=True)
class StepReport:
    """What a step has done."""

    events: list[OutputEvent]
    stats: Stats
    """After it."""
    began: float
    """When, by the clock of ``time.monotonic``, which a machine's processes share."""
    seconds: float
    """That it took; 0: nothing was computed."""
    started: list[str]
    """Requests that it was the first to schedule."""
    handled: int = 0
    """Commands that the engine's process has carried out so far."""
    busy: bool = False
    """Whether the engine has more to do."""
    exporting: bool = False
    """Whether it computes prompts for other servers."""


def pack(report: StepReport) -> bytes:
    """The message of a report."""
    events = report.events
    columns: list[int] = []
    rare: dict[int, dict[str, Any]] = {}
    for i, e in enumerate(events):
        columns += (e.index, len(e.tokens), -1 if e.logprobs is None else len(e.logprobs), _CODES[e.finish],
                    -1 if e.stop_token is None else e.stop_token, e.cached_tokens, e.preemptions)  # fmt: skip
        if e.embedding is not None or e.prompt_logprobs is not None or e.score is not None or (
            e.finish is not None and (e.error or e.stop_string is not None or e.unstructured)
        ):  # fmt: skip
            rare[i] = {name: getattr(e, name) for name in _RARE}
    tokens = array("q", chain.from_iterable(e.tokens for e in events))
    entries = [entry for e in events if e.logprobs for entry in e.logprobs]
    numbers = array("q", chain.from_iterable((entry.token, entry.rank, len(entry.top)) for entry in entries))
    numbers.extend(token for entry in entries for token, _ in entry.top)
    logprobs = array("d", [entry.logprob for entry in entries])
    logprobs.extend(logprob for entry in entries for _, logprob in entry.top)
    names = "\0".join(e.request for e in events).encode()
    started = "\0".join(report.started).encode()
    r, counters = report, (getattr(report.stats, name) for name in _COUNTERS)
    head = _HEAD.pack(r.handled, r.busy, r.exporting, r.began, r.seconds, len(events), len(names), len(started),
                      len(tokens), len(entries), len(numbers), len(logprobs), *counters)  # fmt: skip
    parts = (names, started, array("q", columns), tokens, numbers, logprobs, pickle.dumps(rare) if rare else b"")
    return head + b"".join(parts)


def unpack(message: bytes) -> StepReport:
    """The report of a message."""
    head = _HEAD.unpack_from(message)
    handled, busy, exporting, began, seconds, count, named, begun, n, entries, numbers, floats, *counters = head
    at = _HEAD.size

    def text(size: int) -> list[str]:
        nonlocal at
        at += size
        return message[at - size : at].decode().split("\0") if size else []

    def take(kind: str, size: int) -> list[Any]:
        nonlocal at
        found = array(kind)
        found.frombytes(message[at : at + 8 * size])
        at += 8 * size
        return found.tolist()

    names, started = text(named), text(begun)
    columns, tokens = take("q", _COLUMNS * count), take("q", n)
    found = _entries(take("q", numbers), take("d", floats), entries) if entries else []
    events, first, known = [], 0, 0
    for i, name in enumerate(names):
        index, new, scored, finish, stop, cached, preempted = columns[_COLUMNS * i : _COLUMNS * (i + 1)]
        event = OutputEvent(name, index, tokens[first : first + new], None, _FINISHES[finish],
                            None if stop < 0 else stop, None, "", cached, preempted)  # fmt: skip
        first += new
        if scored >= 0:
            event.logprobs, known = found[known : known + scored], known + scored
        events.append(event)
    if at < len(message):
        for i, values in pickle.loads(message[at:]).items():
            for name, value in values.items():
                setattr(events[i], name, value)
    return StepReport(events, Stats(*counters), began, seconds, started, handled, busy, exporting)


def _entries(numbers: list[int], logprobs: list[float], count: int) -> list[TokenLogprob]:
    """Log-probabilities of ``count`` tokens."""
    found, at, top = [], 3 * count, count
    for i in range(count):
        token, rank, most = numbers[3 * i : 3 * i + 3]
        pairs = tuple(zip(numbers[at : at + most], logprobs[top : top + most], strict=True))
        found.append(TokenLogprob(token, logprobs[i], pairs, rank))
        at, top = at + most, top + most
    return found
