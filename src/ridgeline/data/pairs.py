"""Batches for encoder-decoders: a source for the encoder, and the target that the decoder learns to produce from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from ridgeline.data.batches import IGNORE, Batch, TextBatches, permutation
from ridgeline.data.packing import InstructionBatches, Instructions, Tokenized
from ridgeline.spec.errors import UserError


def shifted(labels: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """What a decoder reads to predict ``labels`` [batch, seq]: its start token, and all of them but the last, with
    ``end`` for padding."""
    first = torch.full_like(labels[:, :1], start)
    return torch.cat((first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE, end)), 1)


@dataclass(frozen=True)
class HalvedBatches:
    """Windows of running text in two halves, of which the second is predicted from the first (the prefix language model
    of arXiv:1910.10683, section 3.2.1)."""

    inner: TextBatches
    """Windows of twice the length."""
    start: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the token ids."""
        return self.inner.tokenizer

    @property
    def digest(self) -> str:
        """A hash of the token ids."""
        return self.inner.digest

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.inner.batch_size

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``."""
        return self._halved(self.inner.batch(step))

    def held_out_batch(self) -> Batch | None:
        """A batch that no step trains on; None when the corpus is too small to spare one."""
        batch = self.inner.held_out_batch()
        return None if batch is None else self._halved(batch)

    def _halved(self, batch: Batch) -> Batch:
        source, target = (half.contiguous() for half in batch.ids.chunk(2, 1))
        return Batch(shifted(target, self.start, 0), target, source=source)


@dataclass(frozen=True)
class PairBatches:
    """Examples as pairs, one in a row, padded: the encoder reads an example up to its last answer, the decoder learns
    the answer."""

    data: Instructions
    seq_len: int
    """Tokens of a source, and of a target."""
    batch_size: int
    start: int
    seed: int = 0
    eval_batches: int = 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the token ids."""
        return self.data.tokenizer

    @property
    def digest(self) -> str:
        """A hash of the examples."""
        return self.data.digest

    @property
    def _held_out(self) -> int:
        return min(self.eval_batches, len(self.data.examples) // (4 * self.batch_size)) * self.batch_size

    def _order(self) -> np.ndarray:
        return np.random.default_rng(self.seed).permutation(len(self.data.examples))

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``, all [batch_size, seq_len]."""
        known = self._order()[: len(self.data.examples) - self._held_out]
        first = step * self.batch_size
        chosen = []
        for i in range(first, first + self.batch_size):
            epoch, at = divmod(i, len(known))
            chosen.append(int(known[permutation(len(known), self.seed, epoch)[at]]))
        return self._rows(chosen)

    def held_out_batch(self) -> Batch | None:
        """Examples that no step trains on; None when there are too few to spare any."""
        spare = self._held_out
        return self._rows([int(i) for i in self._order()[-spare:]]) if spare else None

    def _rows(self, chosen: list[int]) -> Batch:
        shape = (len(chosen), self.seq_len)
        source = torch.full(shape, self.data.end)
        labels = torch.full(shape, IGNORE)
        real = torch.zeros(shape, dtype=torch.bool)
        for row, i in enumerate(chosen):
            read, answer = split(self.data.examples[i], self.data.end)
            read, answer = read[-self.seq_len :], answer[: self.seq_len]  # the end of a long source is what was asked
            source[row, : len(read)] = torch.from_numpy(read)
            labels[row, : len(answer)] = torch.from_numpy(answer)
            real[row, : len(read)] = True
        return Batch(shifted(labels, self.start, self.data.end), labels, source=source, source_mask=real)


AnyBatches = TextBatches | InstructionBatches | HalvedBatches | PairBatches
"""Batches of whatever a model is trained on."""


def split(example: Tokenized, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Source, with the end token, and target: all up to the last answer, and from there on."""
    begins = np.flatnonzero(example.learned & ~np.concatenate(([False], example.learned[:-1])))
    at = int(begins[-1])
    if at == 0:
        raise UserError("an example is an answer without a prompt: an encoder has nothing to read",
                        "give a prompt, and leave train_on_prompt out")  # fmt: skip
    return np.append(example.ids[:at], end), example.ids[at:]
