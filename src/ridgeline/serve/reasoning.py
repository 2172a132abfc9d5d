"""Reasoning that a model writes before its answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from ridgeline.serve.request import Finish
from ridgeline.serve.tool_calls import Piece, Reader, certain

BEGIN, END = "<think>", "</think>"
PARSERS = ("deepseek_r1", "qwen3")
"""By vLLM's names. Whether the prompt or the model begins the reasoning is seen from the prompt, so one reader does."""


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

    @property
    def failed(self) -> bool:
        """As :class:`Reader`."""
        return self._inner is not None and self._inner.failed

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
