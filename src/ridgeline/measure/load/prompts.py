"""Prompts: random token ids, or pieces of a text, of given lengths; a shared beginning if wanted."""

from __future__ import annotations

import copy
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = list[int] | str

LEAST_VOCABULARY = 256
"""Every vocabulary has at least this many ids."""
CHARACTERS_PER_TOKEN = 4
"""Of English under common vocabularies; used where no tokenizer says better. The server's own count is reported."""
PREFIX = 1 << 40
"""Index that the shared beginning is drawn by."""

LETTERS = string.ascii_lowercase + string.digits
MARK = 4
"""Random tokens (or letters) at the beginning of a prompt's own part: pieces of a short text are often the same."""

T = TypeVar("T")
P = TypeVar("P", "RandomIds", "TextIds", "Characters")


class Prompts(Protocol):
    """Prompt ``index`` of ``length`` tokens. A function of the seed, the run, the rate's number and these two alone."""

    def make(self, index: int, length: int) -> Prompt: ...  # noqa: D102

    def at_rate(self, number: int) -> Prompts:
        """The prompts of rate ``number`` of a sweep: other ones, behind the same shared beginning."""


@dataclass(frozen=True)
class Draw:
    """What random choices depend on besides a prompt's index. A server's prefix cache outlives a run: prompts of one
    run, or of one rate, must be no other's."""

    seed: int = 0
    run: int = 0
    rate: int = 0

    def generator(self, index: int) -> np.random.Generator:
        """The generator of prompt ``index``; warm-up has negative ones."""
        return np.random.Generator(np.random.PCG64([self.seed, self.run, self.rate, index & ((1 << 63) - 1)]))


class RandomIds:
    """Token ids drawn evenly from a vocabulary. ``shared``: length of the common prefix in tokens."""

    def __init__(self, vocab_size: int = LEAST_VOCABULARY, seed: int = 0, shared: int = 0, run: int = 0) -> None:
        self.vocab_size, self.draw = vocab_size, Draw(seed, run)
        self.prefix = self._ids(Draw(seed), PREFIX, shared)

    def at_rate(self, number: int) -> RandomIds:
        """The prompts of another rate."""
        return _at_rate(self, number)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt as token ids."""
        own = max(1, length - len(self.prefix))
        return [*self.prefix[: length - own], *self._ids(self.draw, index, own)]

    def _ids(self, draw: Draw, index: int, length: int) -> list[int]:
        found: list[int] = draw.generator(index).integers(self.vocab_size, size=length).tolist()
        return found


class TextIds:
    """Token ids of pieces of a text from random places, each behind a few random ones of it; as text again where
    ``decoded``."""

    def __init__(
        self, text: str, tokenizer: Tokenizer, decoded: bool, seed: int = 0, shared: int = 0, run: int = 0
    ) -> None:
        self.tokenizer, self.decoded, self.draw = tokenizer, decoded, Draw(seed, run)
        self.ids: list[int] = tokenizer.encode(_enough(text)).ids
        self.prefix = _piece(self.ids, Draw(seed).generator(PREFIX), shared)

    def at_rate(self, number: int) -> TextIds:
        """The prompts of another rate."""
        return _at_rate(self, number)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt; decoded, it may count a token more or less where two pieces meet."""
        own = max(1, length - len(self.prefix))
        generator = self.draw.generator(index)
        mark = [self.ids[i] for i in generator.integers(len(self.ids), size=min(MARK, own))]
        ids = self.prefix[: length - own] + mark + _piece(self.ids, generator, own - len(mark))
        return str(self.tokenizer.decode(ids)) if self.decoded else ids


class Characters:
    """Pieces of a text from random places, about as long as wanted, each behind a few random letters."""

    def __init__(self, text: str, seed: int = 0, shared: int = 0, run: int = 0) -> None:
        self.text, self.draw = _enough(text), Draw(seed, run)
        self.prefix = "".join(_piece(self.text, Draw(seed).generator(PREFIX), shared * CHARACTERS_PER_TOKEN))

    def at_rate(self, number: int) -> Characters:
        """The prompts of another rate."""
        return _at_rate(self, number)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt."""
        total = length * CHARACTERS_PER_TOKEN
        own = max(1, total - len(self.prefix))
        generator = self.draw.generator(index)
        mark = "".join(LETTERS[i] for i in generator.integers(len(LETTERS), size=min(MARK, own)))
        return self.prefix[: total - own] + mark + "".join(_piece(self.text, generator, own - len(mark)))


def _at_rate(prompts: P, number: int) -> P:
    other = copy.copy(prompts)
    other.draw = replace(prompts.draw, rate=number)
    return other


def _enough(text: str) -> str:
    if len(text) < 1000:
        raise UserError(f"the text for prompts has only {len(text)} characters", "give a longer one with --data")
    return text


def _piece(units: Sequence[T], generator: np.random.Generator, length: int) -> list[T]:
    """``length`` consecutive units from a random position, repeated from the start if there are too few."""
    start = int(generator.integers(max(1, len(units) - length)))
    found = list(units[start : start + length])
    while len(found) < length:
        found += units[: length - len(found)]
    return found
