"""Beam search inside the engine: beams are forks that share blocks, and their continuations are selected together.

Scores, ranks and the end are those of Hugging Face's beam search, so that results are equal: of the 2 · width likeliest
continuations, those that end and are among the first ``width`` are kept as finished, scored by log-probability over
length ** length_penalty; the best ``width`` that do not end continue. The search ends when no running beam can beat the
worst finished one.

Beams need not be computed in the same step: each adds its candidates when it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ridgeline.serve.outputs import Outputs
from ridgeline.serve.request import Finish, OutputEvent
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.scheduler import Scheduler
from ridgeline.serve.sequence import Sequence, SequenceGroup


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
        """Number of continuations that each beam proposes."""
        return max(2, 1 + len(self.ends)) * self.width

    def select(self, beams: list[Sequence]) -> list[Candidate]:
        """Select among the pending candidates of all ``beams`` → those that continue; empty when the search ends."""
        ranked = sorted(
            (Candidate(b.logprob + p, b, t) for b in beams for t, p in self.pending[b]), key=lambda c: -c.total
        )[: self.candidates]
        length = beams[0].generated + 1
        last = length >= self.max_tokens
        live: list[Candidate] = []
        for rank, c in enumerate(ranked):
            ends = c.token in self.ends
            if (ends or last) and rank < self.width:
                self._finish(c, length, ends)
            if not ends and len(live) < self.width:
                live.append(c)
        self.pending.clear()
        if last or not live or (self.early_stopping and self.full):
            return []
        if self.full and live[0].total / length**self.length_penalty <= self.finished[-1].score:
            return []
        return live

    @property
    def full(self) -> bool:
        """Whether the maximum number of finished beams is reached."""
        return len(self.finished) == self.width

    def _finish(self, c: Candidate, length: int, stop: bool) -> None:
        prompt = len(c.beam.group.request.prompt)
        done = Finished(c.total / length**self.length_penalty, [*c.beam.tokens[prompt:], c.token], stop)
        self.finished = sorted([*self.finished, done], key=lambda f: -f.score)[: self.width]


class BeamSearch:
    """Advances the beam searches of an engine, step by step."""

    def __init__(self, sampler: Sampler, scheduler: Scheduler, outputs: Outputs) -> None:
        self.sampler, self.scheduler, self.outputs = sampler, scheduler, outputs
        self.blocks = scheduler.blocks

    def extend(self, seqs: list[Sequence], logits: Tensor) -> None:
        """Record each beam's candidates; once all beams of a search have theirs, continue with the best."""
        most = max(s.group.beams.candidates for s in seqs if s.group.beams is not None)
        self.sampler.adjust(logits, seqs)
        whole = logits.logsumexp(1, keepdim=True)
        values, ids = self.sampler.search(logits, most)
        for seq, v, i in zip(seqs, (values - whole).tolist(), ids.tolist(), strict=True):
            assert seq.group.beams is not None
            n = seq.group.beams.candidates
            seq.group.beams.pending[seq] = list(zip(i[:n], v[:n], strict=True))
            self.blocks.commit(seq)
        for group in dict.fromkeys(s.group for s in seqs):
            if group.beams is not None and len(group.beams.pending) == len(group.sequences):
                try:
                    self._advance(group, group.beams)
                except Exception as e:
                    self.outputs.fail(group.sequences[0], f"{type(e).__name__}: {e}")

    def _advance(self, group: SequenceGroup, beams: Beams) -> None:
        chosen = beams.select(group.sequences)
        if not chosen:
            self._end(group, beams)
            return
        before, group.sequences = group.sequences, []
        taken: dict[Sequence, list[int]] = {}
        for c in chosen:
            taken.setdefault(c.beam, []).append(len(group.sequences))
            group.sequences.append(c.beam)
        for beam, places in taken.items():
            for at in places[1:]:
                child = Sequence(group, 0, list(beam.tokens), counts=dict(beam.counts))
                self.blocks.fork(beam, child)
                group.sequences[at] = child
                self.scheduler.run(child, beam)
        for beam in before:
            if beam not in taken:
                self.scheduler.remove(beam)
        for seq, c in zip(group.sequences, chosen, strict=True):
            seq.tokens.append(c.token)
            seq.counts[c.token] = seq.counts.get(c.token, 0) + 1
            seq.logprob = c.total
            self.outputs.generated += 1

    def _end(self, group: SequenceGroup, beams: Beams) -> None:
        for index, f in enumerate(beams.finished[: group.request.sampling.n]):
            finish: Finish = "stop" if f.stop else "length"
            self.outputs.events.append(OutputEvent(group.request.id, index, f.tokens, None, finish, score=f.score,
                                                   cached_tokens=group.cached_tokens,
                                                   preemptions=group.preemptions))  # fmt: skip
        for seq in group.sequences:
            self.scheduler.remove(seq)
        del self.outputs.groups[group.request.id]
