"""A client's request, ready for the engine, and what its answer must know of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.serve.detokenize import ServeJob
from ridgeline.serve.harmony import ChannelCount
from ridgeline.serve.late_chunking import Chunks
from ridgeline.serve.reasoning import ReasoningCount
from ridgeline.serve.tool_calls import Reader


@dataclass
class PreparedRequest:
    """A parsed request."""

    id: str
    model: str
    jobs: list[ServeJob]
    echo: bool = False
    texts: list[str] = field(default_factory=list)
    """The prompts as text, where they are echoed; of a chat, the text that its answer begins with."""
    silent: bool = False
    """``max_tokens`` is 0: only the prompt's log-probabilities are requested."""
    reader: Callable[[], Reader] | None = None
    """Makes what finds the calls of functions in one output; None: it is text."""
    reasoning: bool | None = None
    """Whether the prompt ends within reasoning; None: reasoning is not told apart."""
    channels: bool = False
    """Whether reasoning comes in a channel of its own, and not between ``<think>`` and ``</think>``."""
    hides_reasoning: bool = False
    timed: bool = False
    """Whether the answer tells when its tokens came."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report at each place of the prompt."""
    token_ids: bool = False
    """Whether tokens are reported by their ids."""
    named_by_id: bool = False
    """Whether log-probabilities are."""
    chunks: list[Chunks] = field(default_factory=list)
    """Of each input whose vectors are pooled in chunks."""
    handed_over: dict[str, Any] | None = None
    """What the answer tells the server that fetches the prompt's cache."""
    created: int = field(default_factory=lambda: int(time.time()))

    def reasoning_count(self) -> ReasoningCount | ChannelCount:
        """Counts the tokens of one output that are reasoning."""
        vocabulary = self.jobs[0].vocabulary
        return ChannelCount(vocabulary) if self.channels else ReasoningCount(vocabulary, bool(self.reasoning))

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(job.request.prompt) for job in self.jobs)
