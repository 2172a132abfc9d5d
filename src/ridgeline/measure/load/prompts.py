"""What is asked: random token ids, or pieces of a text, of given lengths; a shared beginning if wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = list[int] | str

LEAST_VOCABULARY = 256
"""Any vocabulary has so many ids."""
CHARACTERS_PER_TOKEN = 4
"""Of English under common vocabularies; used where no tokenizer says better. The server's own count is reported."""
PREFIX = 1 << 40
"""Index that the shared beginning is drawn by."""

T = TypeVar("T")


class Prompts(Protocol):
    """Prompt ``index`` of ``length`` tokens; the same index and length always give the same prompt."""

    def make(self, index: int, length: int) -> Prompt: ...  # noqa: D102


class RandomIds:
    """Token ids drawn evenly from a vocabulary. ``shared``: so many tokens at the beginning are the same in all."""

    def __init__(self, vocab_size: int = LEAST_VOCABULARY, seed: int = 0, shared: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed
        self.prefix = _ids(seed, PREFIX, shared, vocab_size)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt as token ids."""
        own = max(1, length - len(self.prefix))
        return [*self.prefix[: length - own], *_ids(self.seed, index, own, self.vocab_size)]


class TextIds:
    """Token ids of pieces of a text from random places; as text again where ``decoded``."""

    def __init__(self, text: str, tokenizer: Tokenizer, decoded: bool, seed: int = 0, shared: int = 0) -> None:
        self.tokenizer, self.decoded, self.seed = tokenizer, decoded, seed
        self.ids: list[int] = tokenizer.encode(_enough(text)).ids
        self.prefix = _piece(self.ids, _start(seed, PREFIX, len(self.ids) - shared), shared)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt; decoded, it may count a token more or less where two pieces meet."""
        own = max(1, length - len(self.prefix))
        ids = self.prefix[: length - own] + _piece(self.ids, _start(self.seed, index, len(self.ids) - own), own)
        return str(self.tokenizer.decode(ids)) if self.decoded else ids


class Characters:
    """Pieces of a text from random places, about as long as wanted."""

    def __init__(self, text: str, seed: int = 0, shared: int = 0) -> None:
        self.text, self.seed = _enough(text), seed
        self.prefix = self._piece(PREFIX, shared * CHARACTERS_PER_TOKEN)

    def make(self, index: int, length: int) -> Prompt:
        """The prompt."""
        total = length * CHARACTERS_PER_TOKEN
        own = max(1, total - len(self.prefix))
        return self.prefix[: total - own] + self._piece(index, own)

    def _piece(self, index: int, length: int) -> str:
        start = _start(self.seed, index, len(self.text) - length)
        return "".join(_piece(list(self.text[start : start + length]), 0, length)) if length else ""


def _enough(text: str) -> str:
    if len(text) < 1000:
        raise UserError(f"the text for prompts has only {len(text)} characters", "give a longer one with --data")
    return text


def _piece(units: list[T], start: int, length: int) -> list[T]:
    """So many from ``start`` on, over again if there are too few."""
    found = units[start : start + length]
    while len(found) < length:
        found += units[: length - len(found)]
    return found


def _start(seed: int, index: int, room: int) -> int:
    return int(_generator(seed, index).integers(max(1, room)))


def _generator(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, index & ((1 << 63) - 1)]))  # warm-up has negative indices


def _ids(seed: int, index: int, length: int, vocab_size: int) -> list[int]:
    found: list[int] = _generator(seed, index).integers(vocab_size, size=length).tolist()
    return found
