"""Text → packed token batches. The order depends on the seed and the step alone, so any step can be resumed exactly."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from ridgeline.data.text import cut, documents
from ridgeline.data.tokenizer import added_around, load_tokenizer
from ridgeline.paths import cache_dir
from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import Training

END, MASK = "<|endoftext|>", "<|mask|>"
MASKS = (MASK, "[MASK]", "<mask>")
"""Names of the mask token: ours, BERT's, RoBERTa's."""
IGNORE = -100
MAX_CHARACTERS = 4_000_000
"""Characters of text read from one source where a part of it is enough, tokenized in seconds."""
CONTEXT = 1000
"""Characters before and behind a piece of a document that are tokenized with it."""


class Batch(NamedTuple):
    """One global batch, as every rank derives it from the step."""

    ids: torch.Tensor
    """[batch, seq] token ids."""
    labels: torch.Tensor
    """[batch, seq] the token that each position should predict, or :data:`IGNORE`."""
    positions: torch.Tensor | None = None
    """[seq] or [batch, seq] position of each token in its sequence; None: 0, 1, …"""
    documents: torch.Tensor | None = None
    """[batch, seq] index of the document that each token belongs to; it attends to no other one. None: one per row."""
    source: torch.Tensor | None = None
    """[batch, source] token ids that an encoder reads."""
    source_mask: torch.Tensor | None = None
    """[batch, source] bool: which of them are no padding; None: all."""


def _sample(source: str, limit: int, whole: bool = False) -> list[str]:
    """Documents of a source, up to ``limit`` characters; ``whole``: its files and directories to their end."""
    texts = list(documents(source, limit) if whole else cut(documents(source), limit))
    size = sum(map(len, texts))
    if size < min(1000, limit):
        raise UserError(f"data {source!r} holds only {size} characters of text", "give a larger file or directory")
    return texts


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus: one flat array of token ids, documents separated by the end token."""

    ids: np.ndarray
    tokenizer: Tokenizer
    source: str
    cached: str = ""
    """Name of its directory in the cache; empty: not cached."""

    @cached_property
    def end(self) -> int | None:
        """The token that ends every document, if one does: the end-of-text token, else what the tokenizer appends."""
        end: int | None = self.tokenizer.token_to_id(END)
        return next(reversed(added_around(self.tokenizer)[1]), None) if end is None else end

    @cached_property
    def begin(self) -> int | None:
        """The token that the tokenizer puts before every document, if it does."""
        return next(iter(added_around(self.tokenizer)[0]), None)

    @cached_property
    def mask(self) -> int:
        """The mask token. Raises :class:`UserError` where there is none."""
        found = (self.tokenizer.token_to_id(name) for name in MASKS)
        mask = next((i for i in found if i is not None), None)
        if mask is None:
            raise UserError(f"the tokenizer has no mask token ({', '.join(MASKS)}), from which an encoder learns",
                            "use the encoder's own tokenizer")  # fmt: skip
        return mask

    @cached_property
    def special(self) -> torch.Tensor:
        """int64 [number]: ids of special tokens."""
        known = self.tokenizer.get_added_tokens_decoder().items()
        return torch.tensor([i for i, token in known if token.special], dtype=torch.int64)

    @cached_property
    def digest(self) -> str:
        """A hash of the token ids."""
        return hashlib.sha256(np.ascontiguousarray(self.ids).data).hexdigest()[:16]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` entries (Sennrich et al. 2016; bytes as in GPT-2)."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise UserError(
            f"a byte-level tokenizer needs at least {len(alphabet) + 2} entries; the model has vocab_size {vocab_size}",
            "use a model with a larger vocabulary, or give --workload.tokenizer",
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, MASK], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def own_tokenizer(checkpoint: str | None) -> str | None:
    """The checkpoint directory, when it has a tokenizer."""
    return checkpoint if checkpoint and (Path(checkpoint) / "tokenizer.json").is_file() else None


def tokenizer_of(w: Training) -> str | None:
    """The tokenizer that the workload names, else its checkpoint's own; None without a checkpoint.

    Raises :class:`UserError` for a checkpoint without one: tokens of another vocabulary would meet its embedding.
    """
    found = w.tokenizer or own_tokenizer(w.checkpoint)
    if found is None and w.checkpoint:
        raise UserError(
            f"checkpoint {w.checkpoint} has no tokenizer.json, and its weights know no tokens but its own",
            "copy its tokenizer.json there, or give --workload.tokenizer; without a checkpoint a new one is made",
        )
    return found


def token_ids(source: str, limit: int, tokenizer: Tokenizer) -> np.ndarray:
    """Token ids (int32) of up to ``limit`` characters of a source, each document followed by the end token."""
    return _encoded(_sample(source, limit), tokenizer)


class _Piece(NamedTuple):
    """A part of a document, in the text around it."""

    text: str
    begin: int
    """Where the part begins in ``text``."""
    end: int
    first: bool
    last: bool


def _encoded(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids (int32) of documents, each followed by the end token, in pieces: what the tokenizer returns of a text
    takes a hundred times its memory."""
    end = tokenizer.token_to_id(END)
    tail = np.asarray([] if end is None else [end], dtype=np.int32)
    found = [tail[:0]]
    for group in _groups(piece for text in texts for piece in _pieces(text)):
        for encoded, piece in zip(tokenizer.encode_batch([p.text for p in group]), group, strict=True):
            found += [_ids_of(encoded, piece), *([tail] if piece.last else [])]
    return np.concatenate(found)


def _ids_of(encoded: Encoding, piece: _Piece) -> np.ndarray:
    """The tokens that begin in a piece, not those of the text around it. What the tokenizer puts around a text is kept
    around the document."""
    ids = np.asarray(encoded.ids, dtype=np.int32)
    if piece.first and piece.last:
        return ids
    starts = np.asarray([start for start, _ in encoded.offsets])
    inside = starts >= piece.begin
    if not piece.last:
        inside &= starts < piece.end
    added = np.asarray([sequence is None for sequence in encoded.sequence_ids])
    before = added & (np.cumsum(~added) == 0)
    return ids[np.where(before, piece.first, np.where(added, piece.last, inside))]


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Consecutive pieces, each time as many as have :data:`MAX_CHARACTERS` together, or more by part of one."""
    group: list[_Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.end - piece.begin
        if size >= MAX_CHARACTERS:
            yield group
            group, size = [], 0
    yield group


def _pieces(text: str) -> Iterator[_Piece]:
    """Parts of a document. One that is longer than :data:`MAX_CHARACTERS` is cut behind lines, where it has any, into
    parts of a sixteenth of that, which the tokenizer's threads share; with the text around them, so that they get the
    tokens that they have in the whole document."""
    begin, most = 0, MAX_CHARACTERS if len(text) <= MAX_CHARACTERS else MAX_CHARACTERS // 16
    while True:
        stop = len(text)
        if stop - begin > most:
            line = text.rfind("\n", begin, begin + most) + 1
            stop = line if line > begin else begin + most
        context = max(0, begin - CONTEXT)
        yield _Piece(text[context : stop + CONTEXT], begin - context, stop - context, begin == 0, stop == len(text))
        if stop == len(text):
            return
        begin = stop


def require_within(largest: int, vocab_size: int) -> None:
    """Raises :class:`UserError` where the largest token id is not one of the model's."""
    if largest >= vocab_size:
        raise UserError(f"the tokenizer makes ids up to {largest}, the model has {vocab_size} tokens",
                        "use the model's own tokenizer")  # fmt: skip


def load_tokens(source: str, vocab_size: int, tokenizer: str | None = None, whole: bool = False) -> Tokens:
    """Tokenize a source, training a byte-level BPE on its first :data:`MAX_CHARACTERS` when no tokenizer is given.

    Cached by content. ``whole``: files and directories to their end, not only these first characters; of each other
    source as many.

    Raises :class:`UserError` where there is too little text, or where the tokenizer has entries beyond ``vocab_size``.
    """
    texts = _sample(source, MAX_CHARACTERS, whole)
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    given = load_tokenizer(tokenizer) if tokenizer else None
    digest.update(json.dumps([vocab_size, given.to_str() if given else None, "v2"]).encode())
    name = digest.hexdigest()[:16]
    found = cached_tokens(name, source)
    if found:
        return found
    trained = given or train_tokenizer(list(cut(texts, MAX_CHARACTERS)), vocab_size)
    if trained.get_vocab_size() > vocab_size:
        raise UserError(
            f"the tokenizer has {trained.get_vocab_size()} entries, the model only {vocab_size}", "use the model's own"
        )
    ids = _encoded(texts, trained)
    require_within(int(ids.max(initial=0)), vocab_size)
    try:
        _cache(name, ids, trained)
    except OSError:  # a read-only or full disk: tokenized again next time
        name = ""
    return Tokens(ids, trained, source, name)


def cached_tokens(name: str, source: str) -> Tokens | None:
    """The tokens of ``source`` that are cached under a name, if they are."""
    array, vocabulary = _cached_files(name)
    if not name or not array.is_file() or not vocabulary.is_file():
        return None
    try:
        return Tokens(np.load(array), Tokenizer.from_file(str(vocabulary)), source, name)
    except Exception:  # not whole, as after a loss of power
        return None


def _cached_files(name: str) -> tuple[Path, Path]:
    folder = cache_dir() / "tokens" / name
    return folder / "ids.npy", folder / "tokenizer.json"


def _cache(name: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    array, vocabulary = _cached_files(name)
    array.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{os.getpid()}.new"  # other ranks and runs may be writing the same
    Path(f"{vocabulary}{mine}").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    os.replace(f"{vocabulary}{mine}", vocabulary)
    with open(f"{array}{mine}", "wb") as f:
        np.save(f, ids)
    os.replace(f"{array}{mine}", array)


@dataclass(frozen=True)
class TextBatches:
    """Packed batches of text: ``batch(step)`` is a pure function of the seed and the step.

    Causal: labels are the inputs shifted by one. Masked (encoders): 15 % of positions, but none of special tokens, are
    replaced and predicted, 80 % by the mask token, 10 % by a random one, 10 % kept (Devlin et al. 2019, section 3.1).
    """

    tokens: Tokens
    seq_len: int
    batch_size: int
    vocab_size: int
    causal: bool = True
    seed: int = 0
    separate: bool = False
    """Whether documents in one window do not see each other."""
    eval_batches: int = 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the token ids."""
        return self.tokens.tokenizer

    @property
    def digest(self) -> str:
        """A hash of the token ids."""
        return self.tokens.digest

    @property
    def windows(self) -> int:
        """Windows of ``seq_len`` in the corpus."""
        return (len(self.tokens.ids) - 1) // self.seq_len

    @property
    def held_out(self) -> int:
        """Windows at the corpus's end kept for evaluation: whole batches, less than a quarter of the corpus."""
        return min(self.eval_batches, self.windows // (4 * self.batch_size)) * self.batch_size

    @property
    def sequences(self) -> int:
        """Windows to train on."""
        return self.windows - self.held_out

    def batch(self, step: int) -> Batch:
        """Ids and labels, both int64 [batch_size, seq_len], of the global batch of ``step``."""
        n = self.sequences
        if n < 1:
            have = f"data {self.tokens.source!r} has {len(self.tokens.ids)} tokens"
            raise UserError(f"{have}: less than one sequence of {self.seq_len}", "use a shorter seq_len or more text")
        first = step * self.batch_size
        rows = []
        for i in range(first, first + self.batch_size):
            epoch, at = divmod(i, n)
            rows.append(permutation(n, self.seed, epoch)[at])
        return self._pack(np.asarray(rows), step)

    def held_out_batch(self) -> Batch | None:
        """A batch that no step trains on; None when the corpus is too small to spare one."""
        if not self.held_out:
            return None
        return self._pack(np.arange(self.sequences, self.windows), -1)

    def _pack(self, rows: np.ndarray, step: int) -> Batch:
        starts = rows * self.seq_len
        ids = self.tokens.ids[starts[:, None] + np.arange(self.seq_len + 1)]
        windows = torch.from_numpy(ids.astype(np.int64))
        inputs = windows[:, :-1].contiguous()
        batch = Batch(inputs, windows[:, 1:].contiguous()) if self.causal else self._masked(inputs, step)
        return batch._replace(**self._documents(inputs)) if self.separate else batch

    def _documents(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers of the documents in each window, and places within them."""
        begins = torch.zeros_like(ids)
        if self.tokens.end is not None:
            begins[:, 1:] = ids[:, :-1] == self.tokens.end
        elif self.tokens.begin is not None:
            begins[:, 1:] = ids[:, 1:] == self.tokens.begin
        else:
            raise UserError(f"document_mask: the tokenizer puts no token between documents, nor has it {END}",
                            "leave document_mask out, or give another --workload.tokenizer")  # fmt: skip
        places = torch.arange(ids.shape[1]).expand_as(ids)
        first = torch.where(begins > 0, places, 0).cummax(1).values
        return {"positions": places - first, "documents": begins.cumsum(1)}

    def _masked(self, ids: torch.Tensor, step: int) -> Batch:
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 1)
        chosen = (torch.rand(ids.shape, generator=g) < 0.15) & ~torch.isin(ids, self.tokens.special)
        kind = torch.rand(ids.shape, generator=g)
        random = torch.randint(self.vocab_size, ids.shape, generator=g)
        labels = torch.where(chosen, ids, IGNORE)
        ids = torch.where(chosen & (kind < 0.8), self.tokens.mask, ids)
        return Batch(torch.where(chosen & (kind >= 0.9), random, ids), labels)


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of ``n`` rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n)
