"""A sequence, and the request that it is part of."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.serve.request import EngineRequest, Finish, Grammar, TokenLogprob, Watch

if TYPE_CHECKING:
    from ridgeline.serve.beam import Beams
    from ridgeline.serve.changes import Occurred
    from ridgeline.serve.drafting import NGrams


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one output, and how far their keys and values are in the pool."""

    group: SequenceGroup
    index: int
    tokens: list[int]
    """The prompt and all generated tokens."""
    n_computed: int = 0
    """Tokens whose keys and values are valid; the scheduler only advances it towards ``total``."""
    draft: list[int] = field(default_factory=list)
    """Tokens that a drafter proposes behind ``tokens``; they are computed with them, and kept as far as they agree."""
    parents: list[int] = field(default_factory=list)
    """Where these are a tree: for each the place in ``draft`` of the one that it follows, -1: the last known token.
    Empty: each follows the one before it."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    keys: list[bytes] = field(default_factory=list)
    """Chained hashes of the leading full blocks, as far as they are known."""
    committed: int = 0
    """Number of leading blocks that are shared."""
    rng: random.Random = field(default_factory=random.Random)
    returned: list[float] = field(default_factory=list)
    """Its random numbers that were drawn for nothing, and come next."""
    counts: dict[int, int] = field(default_factory=dict)
    """How often each generated token occurs."""
    occurred: Occurred | None = None
    """Which tokens occur at all, where a penalty asks for it."""
    ngrams: NGrams | None = None
    """Where n-grams occurred, where drafts are looked up."""
    wide: int = 0
    """Tokens for which its nucleus is expected to be larger than its candidates."""
    grammar: Grammar | None = None
    watch: Watch | None = None
    """Finds the stop strings of an output that is ranked."""
    logprob: float = 0.0
    """Sum of the log-probabilities of the generated tokens, where the request ranks its outputs."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of generated tokens that have not been reported."""
    emitted: int = 0
    """Number of generated tokens that have been reported."""
    finish: Finish | None = None
    stop_token: int | None = None
    error: str = ""
    admitted: int = -1
    """Admission number while it runs."""
    pending: int = 0
    """Tokens behind ``tokens`` that are chosen, are to be computed, and are not known to the host yet: 0 or 1."""

    @property
    def total(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) + self.pending + len(self.draft)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.group.request.prompt)

    @property
    def width(self) -> int:
        """Sequences that it counts as: before its first token, all that will go on from its prompt."""
        begun = self.generated or self.pending or self.group.request.embed
        return 1 if begun else self.group.request.sampling.sequences

    def drop_draft(self) -> None:
        """Propose nothing."""
        self.draft, self.parents = [], []

    def draw(self) -> float:
        """Its next random number, in [0, 1)."""
        return self.returned.pop(0) if self.returned else self.rng.random()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its outputs."""

    request: EngineRequest
    seed: int
    sequences: list[Sequence] = field(default_factory=list)
    """The running sequences: one until the prompt is computed, then as many as requested."""
    done: list[Sequence] = field(default_factory=list)
    """Ended outputs, where they are ranked before they are reported."""
    beams: Beams | None = None
    plain: bool | None = None
    """Whether tokens are chosen without those before, as far as the request tells; None: nobody has asked."""
    scope: bytes = b""
    """What the contents of a cache block depend on besides its tokens: salt, adapter and its version."""
    cached_tokens: int = -1
    """Prompt tokens found in the cache when it first started; -1: it has not."""
    preemptions: int = 0
    """How often one of its sequences was put back."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    hidden: list[Any] | None = None
    """What is pooled of the prompt's hidden states, as far as they are computed (their sum, one of them, or all), or
    its classes' logits."""

    @property
    def ranked(self) -> bool:
        """Whether its outputs are reported only when all have ended."""
        return self.request.sampling.ranked
