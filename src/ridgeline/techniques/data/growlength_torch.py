"""Sequences that grow during a run: the same stream of tokens, cut shorter at first (arXiv:2310.00576)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ridgeline.data.batches import Batch
from ridgeline.runtime.train_build import BatchSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass
class GrowingLength:
    """Batches of another source with their rows cut into pieces of the length that the step's stage prescribes.

    Tokens per batch are constant: a batch [B, L] becomes [B · L / s, s], with its tokens in the same order.
    """

    inner: BatchSource
    lengths: tuple[int, ...]
    """Tokens per sequence of each stage; each divides L."""
    starts: tuple[int, ...]
    """First step of each stage."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that produced the token ids."""
        return self.inner.tokenizer

    def length(self, step: int) -> int:
        """Tokens per sequence at ``step``."""
        return self.lengths[max(0, bisect_right(self.starts, step) - 1)]

    def batch(self, step: int) -> Batch:
        """The batch of ``step``."""
        size = self.length(step)

        def cut(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.reshape(-1, size)

        whole = self.inner.batch(step)
        return Batch(
            whole.ids.reshape(-1, size), whole.labels.reshape(-1, size), cut(whole.positions), cut(whole.documents)
        )

    def held_out_batch(self) -> Batch | None:
        """A full batch at full length."""
        return self.inner.held_out_batch()
