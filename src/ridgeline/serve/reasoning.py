"""Reasoning that a model writes before its answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from ridgeline.serve.request import Finish, Grammar
from ridgeline.serve.tool_calls import Piece, Reader, certain

if TYPE_CHECKING:
    from ridgeline.serve.detokenize import Vocabulary

BEGIN, END = "<think>", "</think>"
LONGEST_TOKEN = 256
"""Bytes of the end of a text in which a marker is looked for."""
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


class ReasoningGrammar:
    """A :class:`ridgeline.serve.request.Grammar` that ends the reasoning in time, and keeps the answer after it."""

    def __init__(
        self, vocabulary: Sequence[bytes], begin: tuple[int, ...], end: tuple[int, ...], thinking: bool,
        budget: int | None = None, answer: Grammar | None = None,
    ) -> None:  # fmt: skip
        """``vocabulary``: the bytes of each token; ``begin``, ``end``: the markers' tokens, as they are written where
        they are due; ``thinking``: the prompt ends within the reasoning; ``budget``: most tokens of it; ``answer``:
        what the answer must be, which need not follow any reasoning."""
        self._vocabulary, self._begin, self._end = vocabulary, begin, end
        self._budget, self._answer = budget, answer
        self._recent = b""
        """The end of the text, since the last marker."""
        self._spent = 0
        self._thinking = thinking
        self._first = not thinking
        """Whether nothing has been written, so that reasoning may begin before an answer that is kept."""
        self._due: list[int] = []
        """Tokens of a marker that are still to be written."""
        self._stop_in_time()

    @property
    def failures(self) -> list[str]:
        """Why the answer could not be kept."""
        return list(getattr(self._answer, "failures", ()))

    def allowed(self) -> Sequence[int] | None:
        """As the protocol says."""
        if self._due:
            return self._due[:1]
        if self._thinking or self._answer is None:
            return None
        found = self._answer.allowed()
        if self._first and found is not None and self._begin[0] not in found:
            return [*found, self._begin[0]]
        return found

    def accept(self, token: int) -> None:
        """As the protocol says."""
        first, self._first = self._first, False
        self._recent = (self._recent + self._vocabulary[token])[-LONGEST_TOKEN:]
        if self._due:
            self._due.pop(0)
            if not self._due:
                self._turn(not self._thinking)
        elif self._thinking:
            self._spent += 1
            if END.encode() in self._recent:  # however its tokens are cut
                self._turn(False)
            self._stop_in_time()
        elif self._answer is None:
            if BEGIN.encode() in self._recent:
                self._turn(True)
        elif first and token == self._begin[0] and token not in (self._answer.allowed() or ()):
            self._due = list(self._begin[1:])
            if not self._due:
                self._turn(True)
        else:
            self._answer.accept(token)

    def fork(self) -> ReasoningGrammar:
        """As the protocol says."""
        made = copy(self)
        made._due = list(self._due)
        made._answer = self._answer.fork() if self._answer is not None else None
        return made

    def _turn(self, thinking: bool) -> None:
        """A marker has been written."""
        self._thinking, self._spent, self._recent = thinking, 0, b""
        self._stop_in_time()

    def _stop_in_time(self) -> None:
        if self._thinking and self._budget is not None and self._spent >= self._budget:
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
