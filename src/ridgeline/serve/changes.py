"""What requests change about logits before a token is chosen: of all rows of a step by the same few operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ridgeline.serve.sequence import Sequence as Row

NEVER = float("-inf")
At = tuple[Tensor, Tensor]
"""Rows and tokens of some logits."""
Ids = np.ndarray[Any, np.dtype[np.int64]]


class Occurred:
    """The different tokens of one sequence, kept as it grows."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._ids: Ids = np.empty(64, dtype=np.int64)
        self._known = 0

    def ids(self, tokens: list[int]) -> Ids:
        """The different ones of ``tokens``, which begin with those of the last call: [C]."""
        new = list(dict.fromkeys(t for t in tokens[self._known :] if t not in self._seen))
        self._known = len(tokens)
        held = len(self._seen)
        if new:
            self._seen.update(new)
            if len(self._seen) > len(self._ids):
                self._ids = np.concatenate([self._ids[:held], np.empty(2 * len(self._seen) - held, dtype=np.int64)])
            self._ids[held : len(self._seen)] = new
        return self._ids[: len(self._seen)]


def change(logits: Tensor, seqs: Sequence[Row], some: Sequence[int]) -> None:
    """Apply penalties, biases and constraints of the requests, but for ``min_tokens``, to rows ``some`` of ``logits``
    [R, V], in place."""
    given = [(i, seqs[i], seqs[i].group.request.sampling) for i in some]
    repeats = [(i, _occurred(seq), s.repetition_penalty) for i, seq, s in given if s.repetition_penalty != 1.0]
    if at := _at([(i, ids) for i, ids, _ in repeats], logits):
        penalty = _each([(p, len(ids)) for _, ids, p in repeats], logits)
        values = logits[at]
        logits[at] = torch.where(values > 0, values / penalty, values * penalty)
    counted = [(i, seq.counts, s) for i, seq, s in given if s.presence_penalty or s.frequency_penalty]
    if at := _at([(i, list(counts)) for i, counts, _ in counted], logits):
        presence = _each([(s.presence_penalty, len(counts)) for _, counts, s in counted], logits)
        frequency = _each([(s.frequency_penalty, len(counts)) for _, counts, s in counted], logits)
        often = put([n for _, counts, _ in counted for n in counts.values()], logits.dtype, logits.device)
        logits[at] -= presence + frequency * often
    if at := _at([(i, list(s.logit_bias)) for i, _, s in given], logits):
        logits[at] += put([b for _, _, s in given for b in s.logit_bias.values()], logits.dtype, logits.device)
    _keep(logits, [(i, s.allowed_token_ids) for i, _, s in given if s.allowed_token_ids])
    if at := _at([(i, [last for *before, last in s.bad_words if _ends(seq, before)]) for i, seq, s in given], logits):
        logits[at] = NEVER
    allowed = [(i, seq.grammar.allowed()) for i, seq, _ in given if seq.grammar is not None]
    _keep(logits, [(i, ids) for i, ids in allowed if ids is not None])


def put(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device; the host does not wait for a GPU's copy."""
    t = torch.as_tensor(values, dtype=dtype)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def _keep(logits: Tensor, rows: Sequence[tuple[int, Any]]) -> None:
    """Let each of these rows choose among its tokens alone."""
    if not rows:
        return
    at = _at(rows, logits)
    kept = None if at is None else logits[at]
    logits.index_fill_(0, put([i for i, _ in rows], torch.int64, logits.device), NEVER)
    if at is not None and kept is not None:
        logits[at] = kept


def _at(rows: Sequence[tuple[int, Any]], logits: Tensor) -> At | None:
    """Where these tokens of each row are; None: there are none."""
    counts = [len(tokens) for _, tokens in rows]
    if not any(counts):
        return None
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in rows])
    both = put(np.stack([np.repeat([i for i, _ in rows], counts), tokens]), torch.int64, logits.device)
    return both[0], both[1]


def _each(numbers: Sequence[tuple[float, int]], logits: Tensor) -> Tensor:
    """Each number as often as it says."""
    values, counts = zip(*numbers, strict=True)
    return put(np.repeat(values, counts), logits.dtype, logits.device)


def _occurred(seq: Row) -> Ids:
    seq.occurred = seq.occurred or Occurred()
    return seq.occurred.ids(seq.tokens)


def _ends(seq: Row, before: Sequence[int]) -> bool:
    """Whether the output so far ends with these tokens."""
    return seq.generated >= len(before) and seq.tokens[len(seq.tokens) - len(before) :] == before
