"""Calibration windows, held-out windows, and the hidden states of the former as they pass through the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.batches import Tokens, load_tokens
from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import Compress

HELD_OUT = 0.1
"""Share of the text, at its end, that calibration never sees."""


SELF = "self"
"""Calibration text that the model writes itself (Norm Tweaking, arXiv:2309.02784, section 3.2)."""


def own_windows(w: Compress) -> Tensor:
    """Token ids [samples, seq] sampled from the model at temperature 1, each from another first token.

    The whole model is in memory for it.
    """
    from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
    from ridgeline.nn.model.generate import generate

    assert w.checkpoint is not None
    model = load_checkpoint(w.checkpoint, dtype=torch.float32)
    draw = torch.Generator().manual_seed(w.seed)
    first = torch.randint(model.spec.vocab_size, (w.samples, 1), generator=draw)
    return generate(model, first, w.seq_len - 1, temperature=1.0, seed=w.seed).clone()


def load_text(w: Compress, vocab_size: int) -> Tokens:
    """The calibration text by the checkpoint's tokenizer. Raises :class:`UserError` when it has none."""
    from ridgeline.data.batches import own_tokenizer

    tokenizer = w.tokenizer or own_tokenizer(w.checkpoint)
    if tokenizer is None and w.checkpoint:
        raise UserError(f"{w.checkpoint} has no tokenizer.json", "give one with --tokenizer")
    return load_tokens(w.data, vocab_size, tokenizer)


def calibration_windows(w: Compress, tokens: Tokens) -> Tensor:
    """Token ids [samples, seq], windows at places drawn by the seed from all but the held-out end of the text.

    Raises :class:`UserError` when the text is too short.
    """
    room = int(len(tokens.ids) * (1 - HELD_OUT)) - w.seq_len
    need = w.samples * w.seq_len
    if room < 0 or len(tokens.ids) < need // 4:  # windows may overlap, but not say the same over and over
        raise UserError(
            f"calibration text {w.data!r} has {len(tokens.ids)} tokens, too few for {w.samples} windows of {w.seq_len}",
            "give more text, or fewer samples (--samples) or shorter ones (--seq-len)",
        )
    starts = np.random.default_rng(w.seed).integers(0, room + 1, w.samples)
    return torch.from_numpy(np.stack([tokens.ids[s : s + w.seq_len] for s in starts]).astype(np.int64))


def held_out_windows(w: Compress, tokens: Tokens) -> Tensor:
    """Token ids [windows, seq + 1] that calibration never saw: the end of its text, or other text.

    Raises :class:`UserError` when there are fewer than two windows.
    """
    ids = tokens.ids[int(len(tokens.ids) * (1 - HELD_OUT)) :]
    if w.eval_data is not None:
        from ridgeline.data.batches import MAX_BYTES, token_ids

        ids = token_ids(w.eval_data, MAX_BYTES, tokens.tokenizer)
    return windows_of(ids, w.seq_len, w.eval_windows, w.eval_data or w.data)


def windows_of(ids: np.ndarray, seq_len: int, most: int, source: str) -> Tensor:
    """Non-overlapping windows [≤ most, seq + 1], spread over the whole text."""
    count = (len(ids) - 1) // seq_len
    if count < 2:
        raise UserError(f"held-out text {source!r} has {len(ids)} tokens, fewer than two windows of {seq_len}",
                        "give more text, or shorter windows (--seq-len)")  # fmt: skip
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
    return torch.from_numpy(np.stack([ids[i * seq_len : (i + 1) * seq_len + 1] for i in chosen]).astype(np.int64))


class Hidden:
    """Hidden states [windows, seq, hidden] fp32, in memory or, above a limit, in a file that is mapped."""

    CHUNK = 8192
    """Tokens that are computed at once."""
    IN_MEMORY = 4e9
    """Bytes up to which they stay in memory."""

    def __init__(self, windows: int, seq: int, width: int, folder: Path, name: str, limit: float = IN_MEMORY) -> None:
        self.shape = (windows, seq, width)
        self._file: Path | None = None
        if windows * seq * width * 4 <= limit:
            self.data = torch.empty(self.shape)
        else:
            self._file = folder / f"{name}.hidden"
            flat = torch.from_file(str(self._file), shared=True, size=windows * seq * width, dtype=torch.float32)
            self.data = flat.view(self.shape)
        self.step = max(1, self.CHUNK // seq)

    def chunks(self) -> Iterator[Tensor]:
        """Views of some windows each; none where there are no windows."""
        if len(self.data):
            yield from torch.split(self.data, self.step)

    def close(self) -> None:
        """Give the memory, or the file, back."""
        self.data = torch.empty(0)
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
