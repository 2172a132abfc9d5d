"""Sources of draft tokens, and when speculation pays off.

A drafted token is kept when it is the one that sampling chooses at its place, with the random number of that place. So
outputs are the same, token for token, as without drafts, and their distribution exactly the model's: the rule of
speculative sampling (Leviathan et al., arXiv:2211.17192) for drafts that are certain of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from ridgeline.nn.model.transformer import Transformer
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.changes import put
from ridgeline.serve.draft_tree import Draft
from ridgeline.serve.runner import Runner
from ridgeline.serve.sequence import Sequence as Row

TRIAL = 8
"""Number of steps for which each mode is tried."""
TERM = 256
"""Number of steps for which the better one is then kept."""


@dataclass
class Trial:
    """Seconds and tokens with and without drafts at about this number of running sequences."""

    steps: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    better: bool = True


class Drafting:
    """Drafts for an engine: on where they have been measured to pay, off where not.

    The number of running sequences decides what a row is worth. For each power of two of it both ways are tried for
    some steps, and the one that made more tokens a second is kept for a while; off, nothing of it runs.
    """

    def __init__(
        self, propose: Callable[[Sequence[Row], list[int]], list[Draft]], most: int, model: nn.Module | None = None
    ) -> None:
        """``propose``: likely next tokens for each sequence, up to its limit; ``most``: maximum tokens of one draft, in
        a tree of one path; ``model``: what drafts, if it has weights."""
        self.propose, self.most, self.model = propose, most, model
        self.trials: dict[int, Trial] = {}

    def tokens(self, running: int) -> int:
        """Tokens to draft for each of ``running`` sequences in the next step."""
        t = self.trials.setdefault(running.bit_length(), Trial())
        trying = t.steps % (2 * TRIAL + TERM)
        on = trying < TRIAL or (trying >= 2 * TRIAL and t.better)
        return self.most if on and running else 0

    def observe(self, running: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Record the duration and the tokens of a step of decoding sequences alone."""
        t = self.trials.setdefault(running.bit_length(), Trial())
        trying = t.steps % (2 * TRIAL + TERM)
        t.steps += 1
        if trying < 2 * TRIAL:
            t.seconds[drafted] += seconds
            t.tokens[drafted] += tokens
        if trying == 2 * TRIAL - 1:
            rates = [n / s if s else 0.0 for n, s in zip(t.tokens, t.seconds, strict=True)]
            t.better = rates[True] > rates[False]
            t.seconds, t.tokens = [0.0, 0.0], [0, 0]


class NGrams:
    """Where the n-grams of one sequence occurred last, up to ``longest`` tokens: kept as the sequence grows, so that a
    draft costs the same however long it is."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.last: dict[tuple[int, ...], int] = {}
        """The position behind each n-gram that ended before the newest token."""
        self.known = 0

    def lookup(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that followed the last earlier occurrence of the newest n-gram, for the longest n that
        occurred before; empty if none did (prompt lookup). ``tokens`` begin with those of the last call."""
        for end in range(self.known + 1, len(tokens)):
            for n in range(1, min(self.longest, end) + 1):
                self.last[tuple(tokens[end - n : end])] = end
        self.known = max(self.known, len(tokens) - 1)
        for n in range(min(self.longest, len(tokens) - 1), 0, -1) if most > 0 else ():
            at = self.last.get(tuple(tokens[-n:]))
            if at is not None:
                return list(tokens[at : at + most])
        return []


class ModelDrafter:
    """A smaller model with the same vocabulary, which keeps a cache of its own and drafts greedily."""

    def __init__(self, model: Transformer, blocks: int, block_size: int, max_model_len: int) -> None:
        # A block more for the padding of captured steps.
        self.runner = Runner(model, (blocks + 1) * block_size, block_size, max_model_len)
        self.blocks = Blocks(blocks, block_size, share=False)
        self.mirrors: dict[Row, Row] = {}
        """For each sequence what this model has read and guessed of it, with its cache."""

    @torch.inference_mode()
    def __call__(self, seqs: Sequence[Row], most: list[int]) -> list[Draft]:
        """Drafts of at most ``most`` tokens for each sequence, all in the same passes. A pass reads the tokens of the
        pass before on the device: the host waits once."""
        self._forget(seqs)
        mirrors = {s: self._mirror(s) for s, n in zip(seqs, most, strict=True) if n > 0}
        try:
            self._draft([(mirrors[s], n) for s, n in zip(seqs, most, strict=True) if n > 0])
        except Exception:
            self._forget([])  # their last tokens are not known
            raise
        return [Draft(mirrors[s].tokens[len(s.tokens) :] if s in mirrors else []) for s in seqs]

    def _draft(self, wanted: list[tuple[Row, int]]) -> None:
        """Append as many tokens as are wanted to each mirror."""
        rounds: list[tuple[list[Row], Tensor]] = []
        for done in range(max((n for _, n in wanted), default=0)):
            active = [m for m, n in wanted if done < n and self._room(m)]
            if not active:
                break
            batch = [(m, len(m.tokens) - m.n_computed) for m in active]
            step, ends = self.runner.describe(batch, []), list(accumulate((n for _, n in batch), initial=-1))[1:]
            if rounds:
                places = {m: i for i, m in enumerate(rounds[-1][0])}
                step.late, step.sources, step.tokens = ends, [places[m] for m in active], rounds[-1][1]
            hidden = self.runner.execute(step)
            last = hidden if len(hidden) == len(ends) else hidden[put(ends, torch.int64, hidden.device)]
            rounds.append((active, self.runner.logits(last).argmax(1)))
            for m in active:
                m.n_computed = len(m.tokens)
                m.tokens.append(0)  # until it is read
        found = iter(torch.cat([tokens for _, tokens in rounds]).tolist() if rounds else [])
        drafted = {m: len(m.tokens) - sum(m in active for active, _ in rounds) for m, _ in wanted}
        for i, (active, _) in enumerate(rounds):
            for m in active:
                m.tokens[drafted[m] + i] = next(found)

    def _mirror(self, seq: Row) -> Row:
        """The mirror of a sequence, brought to what is known of it; its cache is valid as far as both agree."""
        m = self.mirrors.get(seq)
        if m is None:
            m = self.mirrors[seq] = Row(seq.group, seq.index, list(seq.tokens))
            return m
        same = next((i for i, (a, b) in enumerate(zip(m.tokens, seq.tokens, strict=False)) if a != b),
                    min(len(m.tokens), len(seq.tokens)))  # fmt: skip
        m.tokens = list(seq.tokens)
        m.n_computed = min(m.n_computed, same, len(m.tokens) - 1)
        return m

    def _room(self, m: Row) -> bool:
        return self.blocks.grow(m, len(m.tokens)) is not None

    def _forget(self, seqs: Sequence[Row]) -> None:
        """Let go of sequences that are not asked for: they ended, or wait."""
        for seq in self.mirrors.keys() - set(seqs):
            self.blocks.release(self.mirrors.pop(seq))


def draftable(seq: Row) -> bool:
    """Whether a draft may be checked in one pass: what follows must not change how its first token is chosen."""
    s = seq.group.request.sampling
    plain = not (s.presence_penalty or s.frequency_penalty or s.bad_words) and s.repetition_penalty == 1.0
    return plain and seq.grammar is None and seq.group.beams is None and seq.generated > 0
