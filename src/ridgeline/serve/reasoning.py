"""Reasoning that a model writes before its answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING

from ridgeline.serve.request import Finish
from ridgeline.serve.tool_calls import Piece, Reader, certain

if TYPE_CHECKING:
    from ridgeline.serve.detokenize import Vocabulary

BEGIN, END = "<think>", "</think>"
CHANNEL_REASONING = "openai_gptoss"
PARSERS = ("deepseek_r1", "deepseek_v3", "qwen3", "olmo3", CHANNEL_REASONING)
"""By vLLM's names. Whether the prompt or the model begins the reasoning is seen from the prompt, so one reader does for
all but gpt-oss, whose channels :mod:`ridgeline.serve.harmony` reads."""


class Reasoned:
    """An output that may begin with reasoning; what follows is ``inner``'s, or text."""

    def __init__(self, begun: bool, inner: Reader | None = None) -> None:
        """``begun``: the prompt ends within the reasoning."""
        self._inner, self._held = inner, ""
        self._state = "reasoning" if begun else "start"
        self._blank = True
        """Whether only whitespace has come of the part that is being read."""
        self.ends: Finish = inner.ends if inner is not None else "stop"
        self.empty: str | None = inner.empty if inner is not None else None

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As :class:`Reader`."""
        self._held += text
        found: list[Piece] = []
        if self._state == "start":
            self._start(last)
        if self._state == "reasoning":
            self._reasoning(found, last)
        if self._state == "answer":
            found += self._answer(last)
        return found

    def _start(self, last: bool) -> None:
        held = self._held.lstrip()
        if held.startswith(BEGIN):
            self._held, self._state = held[len(BEGIN) :], "reasoning"
        elif last or not BEGIN.startswith(held):
            self._state, self._blank = "answer", False

    def _reasoning(self, found: list[Piece], last: bool) -> None:
        if self._blank:  # a model may write the marker that the prompt has, or newlines
            self._held = self._held.lstrip()
            if not last and self._held and BEGIN.startswith(self._held) and self._held != BEGIN:
                return
            self._held = self._held.removeprefix(BEGIN).lstrip()
        at = self._held.find(END)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(END) :]
            self._state, self._blank = "answer", True
        else:
            size = len(self._held) if last else certain(self._held, END)
            text, self._held = self._held[:size], self._held[size:]
            self._blank = self._blank and not text
        if text:
            found.append(Piece(reasoning=text))

    def _answer(self, last: bool) -> list[Piece]:
        if self._blank:
            self._held = self._held.lstrip()
        self._blank = self._blank and not self._held
        text, self._held = self._held, ""
        if self._inner is not None:
            return self._inner.push(text, last)
        return [Piece(text)] if text else []


class ThinkingBudget:
    """A :class:`ridgeline.serve.request.Grammar` that ends the reasoning once it has ``budget`` tokens."""

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...], budget: int, thinking: bool) -> None:
        """``begin``, ``end``: the markers' tokens; ``thinking``: the prompt ends within the reasoning."""
        self._begin, self._end, self._budget = begin, end, budget
        self._recent: tuple[int, ...] = ()
        self._spent = 0
        self._thinking = thinking
        self._due: list[int] = []
        """Tokens of the end marker that are still to be written."""
        self._stop_in_time()

    def allowed(self) -> list[int] | None:
        """As the protocol says."""
        return self._due[:1] or None

    def accept(self, token: int) -> None:
        """As the protocol says."""
        self._recent = (*self._recent, token)[-max(len(self._begin), len(self._end)) :]
        if self._due:
            self._due.pop(0)
            self._thinking = bool(self._due)
        elif not self._thinking:
            if self._recent[-len(self._begin) :] == self._begin:
                self._thinking, self._spent = True, 0
                self._stop_in_time()
        else:
            self._spent += 1
            self._thinking = self._recent[-len(self._end) :] != self._end
            self._stop_in_time()

    def fork(self) -> ThinkingBudget:
        """As the protocol says."""
        made = copy(self)
        made._due = list(self._due)
        return made

    def _stop_in_time(self) -> None:
        if self._thinking and self._spent >= self._budget:
            self._due = list(self._end)


class ReasoningCount:
    """Counts the tokens of an output that are reasoning, between its markers."""

    def __init__(self, vocabulary: Vocabulary, begun: bool) -> None:
        """``begun``: the prompt ends within the reasoning."""
        self._bytes, self._begun = vocabulary.bytes, begun
        self._text, self._starts = b"", list[int]()
        self._first: int | None = None
        """Where in the text the reasoning begins."""
        self._open = True
        self.tokens = 0
        """Tokens of reasoning so far."""

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens of the output."""
        for token in tokens:
            if not self._open:
                return
            self._starts.append(len(self._text))
            self._text += self._bytes[token]
            self._read(len(self._bytes[token]))

    def _read(self, new: int) -> None:
        begin, end = BEGIN.encode(), END.encode()
        if self._first is None:
            held = self._text.lstrip()
            if held.startswith(begin):
                self._first = len(self._text) - len(held) + len(begin)
            elif begin.startswith(held):
                return
            elif self._begun:
                self._first = 0
            else:
                self._open = False
                return
        at = self._text.find(end, max(self._first, len(self._text) - new - len(end)))
        if at < 0:
            self.tokens += self._starts[-1] >= self._first
        else:
            self._open = False
            self.tokens = sum(self._first <= start < at for start in self._starts)
