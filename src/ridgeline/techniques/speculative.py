"""Draft several tokens, check them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serving import ServeBuild


class Speculative(Technique):
    """Guess the next tokens from what the text has said before, compute them all in one pass, keep those that agree.

    Drafts come from the sequence itself: what followed the last occurrence of its newest n-gram (prompt lookup). A
    drafted token is kept when it is the one that sampling chooses at its place, with the random number of that place;
    so the output is the same, token for token, as without drafts, and its distribution exactly the model's (the rule of
    Leviathan et al. for a draft that is certain of itself).
    """

    card: ClassVar[Card] = Card(
        name="speculative",
        title="Speculative decoding",
        paper="arXiv:2211.17192",
        taxonomy="inference/decoding/speculative",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="2-3x faster decoding of T5-XXL, with identical outputs",
    )
    phase: ClassVar[Phase] = "loop"

    tokens: int = Field(default=4, ge=1, le=16)
    """Most tokens to draft."""
    ngram: int = Field(default=3, ge=1, le=8)
    """Longest n-gram that is looked for; shorter ones follow."""
    max_running: int = Field(default=4, ge=1)
    """Draft only while at most so many sequences run: a fuller batch has better use for the rows."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what drafts save depends on the text, which no predictor knows."""
        return []

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """How many drafts are accepted depends on the text: predicted as if none were."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Draft where few sequences run."""
        run.propose = lambda seqs, most: [lookup(s.tokens, self.ngram, n) for s, n in zip(seqs, most, strict=True)]
        run.draft_tokens = lambda running: self.tokens if running <= self.max_running else 0


def lookup(tokens: Sequence[Any], longest: int, most: int) -> list[int]:
    """Up to ``most`` tokens that followed the last earlier occurrence of the newest n-gram, for the longest n at most
    ``longest`` that occurred before; empty if none did."""
    if most < 1:
        return []
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        tail = list(tokens[-n:])
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at] == tail[0] and list(tokens[at : at + n]) == tail:
                return list(tokens[at + n : at + n + most])
    return []
