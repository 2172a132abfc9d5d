"""All tokens of a step at once: behind each sequence's last known token and behind each drafted one, with one wait.

Which drafted tokens agree is found on the host, from the tokens of all places. Each place has the random number that it
would have had if those before it had been chosen one by one; numbers of places that are not reached are the next ones
again. So tokens are those of choosing round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.serve.changes import put
from ridgeline.serve.likelihoods import Likelihoods, OneCopy, likelihoods
from ridgeline.serve.request import TokenLogprob
from ridgeline.serve.sampler import Chosen, Sampler
from ridgeline.serve.sequence import Sequence


class Place(NamedTuple):
    """Where a token is chosen."""

    seq: Sequence
    row: int
    """Of the hidden states, the token's before it."""
    depth: int
    """Number of drafted tokens before it."""


def places(seq: Sequence, row: int) -> list[Place]:
    """Behind a sequence's last known token, whose row is ``row``, and behind each of its drafted ones."""
    depths = [0]
    for i in range(len(seq.draft)):
        depths.append(depths[(seq.parents[i] if seq.parents else i - 1) + 1] + 1)
    return [Place(seq, row + i, depth) for i, depth in enumerate(depths)]


class Verified:
    """The tokens of some places, and their log-probabilities where these are wanted."""

    def __init__(self, ready: list[tuple[Sequence, int]]) -> None:
        """``ready``: sequences, each with the row of its last known token."""
        self.places = [place for seq, row in ready for place in places(seq, row)]
        self._uniform: dict[Sequence, list[float]] = {}
        for seq, _, depth in self.places:
            numbers = self._uniform.setdefault(seq, [])
            while len(numbers) <= depth:
                numbers.append(0.0 if seq.group.request.sampling.greedy else seq.draw())
        self._reached = dict.fromkeys(self._uniform, 0)
        self._tokens: dict[tuple[Sequence, int], int] = {}
        self._logprobs: dict[tuple[Sequence, int], TokenLogprob] = {}

    def launch(self, some: slice, logits: Tensor, sampler: Sampler, copy: OneCopy) -> Chosen:
        """Choose at ``some`` places, whose ``logits`` [R, V] may be changed; ``copy`` brings what is chosen."""
        here = self.places[some]
        told = [i for i, place in enumerate(here) if wants_logprobs(place.seq)]
        at = put(told, torch.int64, logits.device) if told else None
        raw = None if at is None else logits[at]
        uniform = [self._uniform[place.seq][place.depth] for place in here]
        short = [seq.generated + depth < seq.group.request.sampling.min_tokens for seq, _, depth in here]
        chosen = sampler.launch(logits, [place.seq for place in here], uniform, short)
        changed: set[int] = set()

        def tokens(numbers: list[float]) -> None:
            found, others = chosen.read(list(map(int, numbers)))
            changed.update(others)
            self._tokens.update({(p.seq, p.row): token for p, token in zip(here, found, strict=True)})

        copy.add(chosen.numbers, tokens)
        if raw is not None and at is not None:
            rows, numbers_of = [here[i] for i in told], chosen.numbers
            of = partial(reported, [p.seq for p in rows], raw, sampler)
            found, again = of(numbers_of[at.to(numbers_of.device)]), of if chosen.filtered else None

            def logprobs(numbers: list[float]) -> None:
                chosen_ones, known = [self._tokens[p.seq, p.row] for p in rows], found
                if again is not None and changed.intersection(told):  # their nuclei were larger
                    known = again(put(chosen_ones, torch.int64, logits.device))
                    numbers = known.numbers.flatten().tolist()
                told_of = known.read(chosen_ones, numbers)
                self._logprobs.update({(p.seq, p.row): one for p, one in zip(rows, told_of, strict=True)})

            copy.add(found.numbers, logprobs)
        return chosen

    def take(self, active: list[tuple[Sequence, int]]) -> tuple[list[int], dict[int, TokenLogprob]]:
        """The tokens of places that are reached (sequences and rows), and the log-probabilities of some, by their
        positions in ``active``."""
        for seq, _ in active:
            self._reached[seq] += 1
        logprobs = {i: self._logprobs[place] for i, place in enumerate(active) if place in self._logprobs}
        return [self._tokens[place] for place in active], logprobs

    def give_back(self) -> None:
        """Let the random numbers of places that were not reached be the sequences' next ones again."""
        for seq, numbers in self._uniform.items():
            if not seq.group.request.sampling.greedy:
                seq.returned = numbers[self._reached[seq] :] + seq.returned


def verified(
    ready: list[tuple[Sequence, int]], logits: Callable[[list[int]], Tensor], sampler: Sampler, copy: OneCopy,
    rows_at_once: int,
) -> Verified:  # fmt: skip
    """Choose at all places of ``ready`` sequences, each with the row of its last known token; ``logits``: of some rows.
    The host waits once, with all else that ``copy`` brings."""
    found = Verified(ready)
    try:
        for at in range(0, len(found.places), rows_at_once):
            some = slice(at, at + rows_at_once)
            chosen = found.launch(some, logits([place.row for place in found.places[some]]), sampler, copy)
            if chosen.filtered and some.stop < len(found.places):
                copy.read()  # whose logits would be kept
        copy.read()
    except Exception:
        found.give_back()
        raise
    return found


def reported(seqs: list[Sequence], raw: Tensor, sampler: Sampler, tokens: Tensor) -> Likelihoods:
    """What the requests of ``seqs`` want to know about their ``tokens`` [R], from their unchanged logits ``raw``
    [R, V]."""
    settings = [s.group.request.sampling for s in seqs]
    tops, named = [s.logprobs or 0 for s in settings], [s.logprob_token_ids for s in settings]
    return likelihoods(raw, tokens.to(raw.device), tops, sampler.search, named)


def wants_logprobs(seq: Sequence) -> bool:
    """Whether a sequence needs the log-probabilities of its tokens."""
    return seq.group.request.sampling.logprobs is not None or seq.group.ranked
