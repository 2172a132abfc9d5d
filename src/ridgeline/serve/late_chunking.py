"""Late chunking (Günther et al., arXiv:2409.04701): a text is read as a whole, and the vectors of its tokens are pooled
in chunks, so that each chunk's vector knows the rest of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]


@dataclass(frozen=True)
class Chunks:
    """The chunks of one input, each of ``size`` tokens but the last."""

    size: int
    offsets: Sequence[Range]
    """Characters of each token; empty for one that the tokenizer adds."""

    def tokens(self) -> list[Range]:
        """Tokens of each chunk: first, end."""
        count = len(self.offsets)
        return [(start, min(start + self.size, count)) for start in range(0, count, self.size)]

    def characters(self) -> list[Range | None]:
        """Characters of each chunk: first, end; None for one of added tokens alone."""
        found = []
        for start, end in self.tokens():
            own = [(a, b) for a, b in self.offsets[start:end] if a < b]
            found.append((min(a for a, _ in own), max(b for _, b in own)) if own else None)
        return found

    def pooled(self, vectors: Sequence[Sequence[float]]) -> list[list[float]]:
        """The mean of each chunk's ``vectors`` [tokens, H]: [chunks, H]."""
        return [[sum(column) / (end - start) for column in zip(*vectors[start:end], strict=True)]
                for start, end in self.tokens()]  # fmt: skip

    def described(self) -> dict[str, Any]:
        """As an answer says it, with vLLM's names."""
        ranges = zip(self.tokens(), self.characters(), strict=True)
        chunks = [{"token_range": tokens, "char_range": characters} for tokens, characters in ranges]
        return {
            "strategy": "fixed_tokens",
            "chunk_size": self.size,
            "input_tokens": len(self.offsets),
            "chunks": chunks,
        }
