"""Examples → rows of tokens: several examples share a row without seeing each other (arXiv:2107.02027), or one per row.

The order depends on the seed and the step alone, so any step can be resumed exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from ridgeline.data.batches import END, IGNORE, Batch, permutation, require_within
from ridgeline.data.examples import Example, find_template, read_examples, special_tokens, tokenizer_config
from ridgeline.data.tokenizer import added_around, load_tokenizer
from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import FineTune

AT_ONCE = 1000
"""Number of examples that are tokenized at once."""
OPEN_ROWS = 64
"""Number of open rows that an example may be added to while packing."""


@dataclass(frozen=True)
class Tokenized:
    """One example: token ids, and for each whether it is an answer's (to be predicted)."""

    ids: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Instructions:
    """A data file as tokens, and what was skipped."""

    examples: list[Tokenized]
    tokenizer: Tokenizer
    end: int
    """Padding token."""
    source: str
    bad: list[tuple[str, str]]
    """(place, reason) of every record that was skipped."""
    cut: int = 0
    """Number of examples longer than a row, which were truncated."""
    dropped: int = 0
    """Number of examples whose answer starts beyond the end of a row."""

    @cached_property
    def digest(self) -> str:
        """A hash of the examples: their token ids, and which of them are learned."""
        found = hashlib.sha256()
        for e in self.examples:
            for part in (np.int64(len(e.ids)), e.ids, e.learned):
                found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:16]


def load_instructions(w: FineTune, vocab_size: int, whole: bool = False) -> Instructions:
    """Read, render and tokenize ``w.data``; ``whole``: examples longer than a row are not cut.

    Raises :class:`UserError` naming file and line of what cannot be used.
    """
    place = w.tokenizer or w.checkpoint
    if place is None:
        raise UserError("instruction data need a tokenizer, and there is no checkpoint that brings one",
                        "start from a checkpoint, or give --workload.tokenizer")  # fmt: skip
    tokenizer = load_tokenizer(place)
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, the model only {vocab_size}",
            "use the model's own",
        )
    folder = place if Path(place).is_dir() else w.checkpoint
    examples, bad = read_examples(Path(w.data).expanduser(), find_template(w.template, folder), w.skip_bad)
    special = special_tokens(folder)
    end = next((i for t in (special["eos_token"], END) if t and (i := tokenizer.token_to_id(t)) is not None), None)
    first = _first(tokenizer, folder, special["bos_token"])
    kept, cut, dropped = [], 0, 0
    for example, tokens in zip(examples, _encoded(examples, tokenizer), strict=True):
        one = _tokenized(example, tokens.ids, tokens.offsets, first if example.ends else [], end, w.train_on_prompt)
        if len(one.ids) > w.seq_len + 1 and not whole:
            one = Tokenized(one.ids[: w.seq_len + 1], one.learned[: w.seq_len + 1])
            cut += 1
        if one.learned[1:].any():
            kept.append(one)
        else:
            dropped += 1
    if not kept:
        raise UserError(f"no example of {w.data} has its answer within seq_len {w.seq_len}", "use a longer seq_len")
    require_within(max(int(one.ids.max()) for one in kept), vocab_size)
    return Instructions(kept, tokenizer, end or 0, w.data, bad, cut, dropped)


def _first(tokenizer: Tokenizer, folder: str | None, bos: str) -> list[int]:
    """What a text without a chat template begins with: as ``tokenizer_config.json`` says, else as the tokenizer."""
    wanted = tokenizer_config(folder).get("add_bos_token")
    if wanted is None:
        return added_around(tokenizer)[0]
    found = tokenizer.token_to_id(bos) if wanted else None
    return [] if found is None else [found]


def _encoded(examples: list[Example], tokenizer: Tokenizer) -> Iterator[Encoding]:
    """Some at a time: what the tokenizer returns of a text takes tens of times its memory."""
    for at in range(0, len(examples), AT_ONCE):
        yield from tokenizer.encode_batch([e.text for e in examples[at : at + AT_ONCE]], add_special_tokens=False)


def _tokenized(
    example: Example,
    ids: list[int],
    offsets: list[tuple[int, int]],
    first: list[int],
    end: int | None,
    all_of_it: bool,
) -> Tokenized:
    """A token is learned when it begins within an answer, whatever of the prompt it may share."""
    starts = np.array([a for a, _ in offsets])
    learned = np.zeros(len(ids), bool)
    for a, b in [(0, len(example.text))] if all_of_it else example.learned:
        learned |= (starts >= a) & (starts < b)
    tokens, marks = list(ids), learned.tolist()
    if tokens[: len(first)] != first:
        tokens, marks = [*first, *tokens], [False] * len(first) + marks
    if example.ends and end is not None:
        tokens, marks = [*tokens, end], [*marks, True]
    return Tokenized(np.asarray(tokens, np.int64), np.asarray(marks, bool))


def pack(lengths: list[int], size: int, order: np.ndarray) -> list[list[int]]:
    """Rows of example numbers whose lengths add up to at most ``size``: in the given order, each into the fullest of
    the last rows that has room (best fit)."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, row), of open rows
    for i in order:
        need = lengths[i]
        fits = [(left, row) for left, row in room if left >= need]
        if fits:
            left, row = min(fits)
            room.remove((left, row))
        else:
            left, row = size, len(rows)
            rows.append([])
        rows[row].append(int(i))
        if left - need > 0:
            room.append((left - need, row))
            if len(room) > OPEN_ROWS:
                room.remove(min(room))
    return rows


@dataclass(frozen=True)
class InstructionBatches:
    """Batches of rows of examples: labels are the answers' tokens, positions start anew in every example."""

    data: Instructions
    seq_len: int
    batch_size: int
    packing: bool = True
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

    @cached_property
    def split(self) -> tuple[list[list[int]], list[list[int]]]:
        """(rows to train on, rows held out), no example in both."""
        # The last token of an example is only predicted, so it takes one place less.
        lengths = [max(1, len(e.ids) - 1) for e in self.data.examples]
        order = np.random.default_rng(self.seed).permutation(len(lengths))
        rows = pack(lengths, self.seq_len, order) if self.packing else [[int(i)] for i in order]
        spare = min(self.eval_batches, len(rows) // (4 * self.batch_size)) * self.batch_size
        return rows[: len(rows) - spare], rows[len(rows) - spare :]

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``, all [batch_size, seq_len]."""
        rows = self.split[0]
        first = step * self.batch_size
        chosen = []
        for i in range(first, first + self.batch_size):
            epoch, at = divmod(i, len(rows))
            chosen.append(rows[permutation(len(rows), self.seed, epoch)[at]])
        return self._rows(chosen)

    def held_out_batch(self) -> Batch | None:
        """Rows that no step trains on; None when there are too few examples to spare any."""
        rows = self.split[1]
        return self._rows(rows) if rows else None

    def _rows(self, rows: list[list[int]]) -> Batch:
        shape = (len(rows), self.seq_len)
        ids = np.full(shape, self.data.end, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for r, row in enumerate(rows):
            at = 0
            for number, i in enumerate(row):
                one = self.data.examples[i]
                to = at + len(one.ids) - 1
                ids[r, at:to] = one.ids[:-1]
                labels[r, at:to] = np.where(one.learned[1:], one.ids[1:], IGNORE)
                positions[r, at:to] = np.arange(to - at)
                documents[r, at:to] = number
                at = to
            documents[r, at:] = len(row)  # padding, which nothing attends to
        tensors = [torch.from_numpy(t) for t in (ids, labels, positions, documents)]
        return Batch(*tensors) if self.packing else Batch(*tensors[:2])
