"""Beam search inside the engine: beams are forks that share blocks, and what they become is decided together.

Scores, ranks and the end are those of Hugging Face's beam search, so that results are equal: of the 2 · width likeliest
continuations, those that end and are among the first ``width`` are kept as finished, scored by log-probability over
length ** length_penalty; the best ``width`` that do not end go on. It is over when no beam that goes on can pass the
worst finished one.

Beams need not be computed in the same step: each brings its candidates when it can.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.serve.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam and one more token, with the log-probability of both."""

    total: float
    beam: Sequence
    token: int


@dataclass(slots=True)
class Finished:
    """A beam that ended: generated tokens, and its penalized score."""

    score: float
    tokens: list[int]
    stop: bool
    """Whether by an end token."""


@dataclass(slots=True)
class Beams:
    """The state of one search."""

    width: int
    length_penalty: float
    early_stopping: bool
    ends: frozenset[int]
    max_tokens: int
    pending: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    """Candidates (token, log-probability) of the beams that have been computed."""
    finished: list[Finished] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """Continuations that each beam must bring."""
        return max(2, 1 + len(self.ends)) * self.width

    def select(self, beams: list[Sequence]) -> list[Candidate]:
        """Decide on the pending candidates of all ``beams`` → those that go on; none when the search is over."""
        ranked = sorted(
            (Candidate(b.logprob + p, b, t) for b in beams for t, p in self.pending[b]), key=lambda c: -c.total
        )[: self.candidates]
        length = beams[0].generated + 1
        last = length >= self.max_tokens
        going: list[Candidate] = []
        for rank, c in enumerate(ranked):
            ends = c.token in self.ends
            if (ends or last) and rank < self.width:
                self._finish(c, length, ends)
            if not ends and len(going) < self.width:
                going.append(c)
        self.pending.clear()
        if last or not going or (self.early_stopping and self.full):
            return []
        if self.full and going[0].total / length**self.length_penalty <= self.finished[-1].score:
            return []
        return going

    @property
    def full(self) -> bool:
        """Whether as many have finished as are kept."""
        return len(self.finished) == self.width

    def _finish(self, c: Candidate, length: int, stop: bool) -> None:
        prompt = len(c.beam.group.request.prompt)
        done = Finished(c.total / length**self.length_penalty, [*c.beam.tokens[prompt:], c.token], stop)
        self.finished = sorted([*self.finished, done], key=lambda f: -f.score)[: self.width]
