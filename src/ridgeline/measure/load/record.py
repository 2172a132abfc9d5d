"""The outcome of one request, as the client saw it. Times are seconds on the event loop's clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning")
"""Where a chat's chunk may have text: the answer, and thoughts as older and newer servers name them."""


@dataclass(slots=True)
class Record:
    """One request. A time or count that is not known is None."""

    index: int
    intended: float
    """Intended send time; in a closed loop, the actual one."""
    prompt_len: int
    output_len: int
    """Number of requested tokens."""
    sent: float | None = None
    chunks: list[float] = field(default_factory=list)
    """Arrival time of each chunk with text."""
    end: float | None = None
    """Arrival time of the last chunk of the choice, with text or only the finish reason."""
    prompt_tokens: int | None = None
    """As counted by the server, like the two below."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str = ""
    """Kind of failure: ``HTTP 503``, ``connection refused``, ``timeout``, ``cut off``, …; empty: answered."""
    detail: str = ""
    """The error message of the server or the system."""

    @property
    def ok(self) -> bool:
        """Whether it was answered completely."""
        return not self.error and self.end is not None

    @property
    def first(self) -> float | None:
        """When the first text came; of an answer without any, when it ended."""
        return self.chunks[0] if self.chunks else self.end

    @property
    def tokens(self) -> int:
        """Tokens generated: as the server counts, else chunks with text."""
        return self.output_tokens if self.output_tokens is not None else len(self.chunks)

    @property
    def ttft(self) -> float:
        """Seconds from the intended send time to the first text."""
        assert self.first is not None
        return self.first - self.intended

    @property
    def e2e(self) -> float:
        """Seconds from the intended send time to the end."""
        assert self.end is not None
        return self.end - self.intended

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        if self.tokens < 2 or self.end is None or self.first is None:
            return None
        return (self.end - self.first) / (self.tokens - 1)

    @property
    def lag(self) -> float:
        """Seconds by which the client sent it late."""
        assert self.sent is not None
        return self.sent - self.intended

    def fail(self, kind: str, detail: str = "") -> None:
        """Record a failure; only the first one is kept."""
        if not self.error:
            self.error, self.detail = kind, detail[:300]

    def event(self, data: bytes, now: float) -> None:
        """One server-sent event's data, which came at ``now``."""
        if data == b"[DONE]":
            return
        try:
            message = json.loads(data)
            choices, usage, error = message.get("choices"), message.get("usage"), message.get("error")
            for choice in choices or ():
                self._choice(choice, now)
        except (ValueError, AttributeError, TypeError):
            self.fail("not an API event", data[:200].decode("utf-8", "replace"))
            return
        if usage:
            self._usage(usage)
        if error:
            self.fail("error in the stream", error.get("message", "") if isinstance(error, dict) else str(error))

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else next((delta[k] for k in TEXTS if delta.get(k)), None)
        if text:
            self.chunks.append(now)
            self.end = now
        if choice.get("finish_reason"):
            self.finish = choice["finish_reason"]
            self.end = now

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached_tokens)

    def plain(self, origin: float) -> dict[str, Any]:
        """For a file: seconds since ``origin``."""

        def since(t: float | None) -> float | None:
            return None if t is None else round(t - origin, 6)

        return {
            "index": self.index, "intended_s": since(self.intended), "sent_s": since(self.sent),
            "first_s": since(self.first), "end_s": since(self.end), "prompt_len": self.prompt_len,
            "output_len": self.output_len, "prompt_tokens": self.prompt_tokens, "output_tokens": self.tokens,
            "cached_tokens": self.cached_tokens, "finish": self.finish, "error": self.error, "detail": self.detail,
            "chunks_s": [since(t) for t in self.chunks],
        }  # fmt: skip
