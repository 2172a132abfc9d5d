"""Sequences that grow while a run goes on: the same stream of tokens, cut shorter at first (arXiv:2310.00576)."""

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
    """Batches of another source with their rows cut into pieces, as long as the step's stage says.

    Constant tokens per batch: a batch [B, L] becomes [B · L / s, s], in the order of its tokens.
    """

    inner: BatchSource
    lengths: tuple[int, ...]
    """Of each stage, dividing L."""
    starts: tuple[int, ...]
    """First step of each stage."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the token ids."""
        return self.inner.tokenizer

    def length(self, step: int) -> int:
        """Tokens per sequence in ``step``."""
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
        """A whole batch at full length."""
        return self.inner.held_out_batch()
