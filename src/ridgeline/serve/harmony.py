"""Outputs in channels, as gpt-oss writes them (OpenAI's Harmony format): reasoning, calls of functions, and the answer.

A message is ``<|channel|>NAME<|message|>TEXT`` up to ``<|end|>``, ``<|call|>`` or ``<|return|>``; the next one begins
with ``<|start|>assistant``. ``to=functions.NAME`` before ``<|message|>`` makes it a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.serve.request import Finish
from ridgeline.serve.tool_calls import Piece, Tools

if TYPE_CHECKING:
    from ridgeline.serve.detokenize import Vocabulary

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_TO = re.compile(r"\bto=(?:functions\.([^\s<]+)|[^\s<]+)")
_REASONING = "analysis"


@dataclass(frozen=True)
class Channels:
    """The format, as one of :data:`ridgeline.serve.call_formats.FORMATS`."""

    special: bool = True
    id_length: int = 0

    def reader(self, make_id: Callable[[], str], parallel: bool, tools: Tools) -> ChannelReader:
        """Reads one output."""
        return ChannelReader(make_id, parallel)


class ChannelReader:
    """Reads one output, whose first message the prompt has begun."""

    empty: str | None = None
    ends: Finish = "tool_calls"

    def __init__(self, make_id: Callable[[], str], parallel: bool = True) -> None:
        self._make_id, self._parallel = make_id, parallel
        self._held = ""
        self._count = 0
        """Calls that have begun."""
        self._kind: str | None = None
        """What the message is: reasoning, call or text; None: its header is being read."""

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As :class:`ridgeline.serve.tool_calls.Reader`."""
        self._held += text
        found: list[Piece] = []
        while self._header(found, last) if self._kind is None else self._body(found, last):
            pass
        return found

    def _header(self, found: list[Piece], last: bool) -> bool:
        header, mark, rest = self._held.partition(MESSAGE)
        if mark:
            name = _TO.search(header)
            self._held = rest
            if name is not None and name[1] is None:
                self._kind = "dropped"  # a tool of the model's maker, which nobody runs here
            elif name is not None:
                self._kind = "call" if self._parallel or not self._count else "dropped"
                if self._kind == "call":
                    found.append(Piece(call=self._count, id=self._make_id(), name=name[1]))
                    self._count += 1
            else:
                self._kind = "reasoning" if _reasons(header) else "text"
            return True
        begun = header.lstrip().startswith(("<|channel|>", "<|start|>", "assistant", "to="))
        if last and (CHANNEL in header or "<|start|>" in header):  # cut off within a header
            self._held = ""
            return False
        if last or (header.strip() and not begun and not _may_begin(header.lstrip())):  # not in channels
            self._kind = "text"
            return True
        return False

    def _body(self, found: list[Piece], last: bool) -> bool:
        ends = [(at, end) for end in ENDS if (at := self._held.find(end)) >= 0]
        at, end = min(ends, default=(len(self._held), ""))
        text = self._held[:at]
        if not end and not last:
            text = text[: len(text) - _begun(text)]
        if text and self._kind != "dropped":
            found.append(self._piece(text))
        self._held = self._held[len(text) + len(end) :]
        if end:
            self._kind = None
        return bool(end)

    def _piece(self, text: str) -> Piece:
        if self._kind == "call":
            return Piece(call=self._count - 1, arguments=text)
        return Piece(reasoning=text) if self._kind == "reasoning" else Piece(text)


def _reasons(header: str) -> bool:
    """Whether the message behind a header is reasoning: in its channel, and to nobody."""
    return header.rpartition(CHANNEL)[2].split()[:1] == [_REASONING] and _TO.search(header) is None


def _may_begin(text: str) -> bool:
    """Whether a header may begin with ``text``."""
    return any(begin.startswith(text) for begin in (CHANNEL, "<|start|>", "assistant", "to="))


def _begun(text: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of a marker."""
    longest = max(map(len, ENDS)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(e.startswith(text[-n:]) for e in ENDS)), 0)


class ChannelCount:
    """Counts the tokens of an output that are reasoning."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = vocabulary.bytes
        self._header: list[str] | None = []
        """Of the message so far; None: it has ended."""
        self._inside = False
        self.tokens = 0
        """Tokens of reasoning so far."""

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens of the output."""
        for token in tokens:
            text = self._bytes[token].decode(errors="replace")
            if text in ENDS:
                self._header, self._inside = [], False
            elif self._header is None:
                self.tokens += self._inside
            elif text == MESSAGE:
                self._inside = _reasons("".join(self._header))
                self._header = None
            else:
                self._header.append(text)
