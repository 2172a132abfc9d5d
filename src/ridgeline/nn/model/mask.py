"""What queries see, and what attention does to their scores beside.

Shapes: B batch, S queries, T keys, H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.nn.model.flash_blocks import Sequences, has_varlen
from ridgeline.nn.model.rotary import Rope
from ridgeline.nn.model.spans import make_spans
from ridgeline.spec.model import ModelSpec


class ScoreChanges(NamedTuple):
    """What a model's attention does to its scores beside scaling and masking them."""

    soft_cap: float | None
    """Scores s become cap · tanh(s / cap), before anything is added (arXiv:2408.00118, section 2)."""
    slopes: tuple[float, ...] | None
    """ALiBi: head h adds slope h · (position of the key - that of the last key); constants per row do not matter."""
    sinks: Tensor | None
    """[H]: one more score in each head's softmax, of a key without a value (arXiv:2508.10925)."""

    def bias(self, total: int, like: Tensor) -> Tensor | None:
        """ALiBi's bias [H, 1, T] of ``total`` keys."""
        if self.slopes is None:
            return None
        far = torch.arange(1 - total, 1, dtype=like.dtype, device=like.device)
        return torch.tensor(self.slopes, dtype=like.dtype, device=like.device)[:, None, None] * far


class Mask(NamedTuple):
    """The attention mask: an additive bias (None: no bias), whether causality applies in addition, and, for a backend
    that masks documents itself, the documents' numbers, or for one that attends within each, where they end."""

    bias: Tensor | None  # [S, T], [B, 1, S, T] or [1 or B, H, S, T]
    causal: bool
    documents: Tensor | None = None  # [B, whole sequence]
    changes: ScoreChanges | None = None  # beside the mask, where the model has any
    kept: dict[str, Tensor] | None = None  # what one layer computes for all
    scale: Tensor | None = None  # [S, 1, 1] or [B, S, 1, 1], by which queries are multiplied
    sequences: Sequences | None = None  # the rows' documents, or the rows
    window: int = 0  # newest tokens that a token sees; 0: all, or as the bias says
    rope: Rope | None = None  # by which a cache turns queries and keys
    spans: Tensor | None = None  # what tokens see, for our kernel, which needs nothing else of all this


def make_mask(
    spec: ModelSpec,
    windowed: bool,
    padding: Tensor | None,
    start: int,
    length: int,
    wants_bias: bool,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    sequences: Sequences | None = None,
    rows: int = 0,
) -> Mask:
    """The mask for queries ``start .. start + length`` over keys ``0 .. start + length``.

    ``windowed``: in layers with a sliding window, if the model has one.

    ``padding`` [B, T] bool: True = real token. ``documents`` [B, T]: a token sees only those of the same number.
    ``positions`` [S] or [B, S]: those of the queries, where they are others. No tensor is made where a flag says it
    all, nor where the backend can attend within ``sequences`` (the documents, or the rows) instead, nor where our
    kernel attends to all else: of a batch of ``rows``, if it can (0: it cannot).
    """
    total = start + length
    scale = None if windowed else temperature(spec, positions, start, length, device)
    window = spec.sliding_window if windowed else None
    if window is not None and total <= window and not (spec.chunked_window and positions is not None):
        window = None
    causal = spec.causal and length > 1  # a single, last query sees every key anyway
    changed = rows > 0 and (spec.attention_soft_cap is not None or spec.position == "alibi")
    if padding is None and window is None and documents is None and not changed:
        if not causal:
            return Mask(None, False, scale=scale)
        if start == 0 and not wants_bias:
            return Mask(None, True, scale=scale)
    slides = window is None or (has_varlen(device) and not spec.chunked_window)
    fresh = padding is None and start == 0 and length > 1
    if sequences is not None and fresh and slides:
        return Mask(None, causal, scale=scale, sequences=sequences, window=window or 0)
    chunked = window is not None and spec.chunked_window
    if rows and fresh and (not chunked or positions is None or documents is not None):
        newest = window or 0
        spans = make_spans(rows, length, documents, causal, -newest if chunked else newest, device)
        return Mask(None, causal, scale=scale, spans=spans)
    query = torch.arange(start, total, device=device)[:, None]
    key = torch.arange(total, device=device)
    allowed = key <= query if spec.causal else (key >= 0).expand(length, -1)
    if window is not None and spec.chunked_window:
        allowed = allowed & _same_chunk(window, positions, start, key)
    elif window is not None:
        allowed = allowed & (key > query - window)
    if padding is not None:
        allowed = allowed & padding[:, None, None, :]
    if documents is not None:
        allowed = allowed & (documents[:, None, start:, None] == documents[:, None, None, :])
    # Half the lowest number, not -inf: a query that may see nothing (padding) then gets a finite, unused average
    # instead of NaN, and adding a negative score to it cannot overflow.
    bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return Mask(bias.masked_fill_(~allowed, torch.finfo(dtype).min / 2), False, scale=scale)


def _same_chunk(size: int, positions: Tensor | None, start: int, key: Tensor) -> Tensor:
    """Whether queries and keys are in the same chunk of ``size`` positions, [S, T] or [B, 1, S, T]."""
    if positions is None:
        chunk = key // size
        return chunk[start:, None] == chunk
    own = positions if start == 0 else positions[..., -1:] + (key - key[-1])  # those before are taken to be contiguous
    chunk = own // size
    same = chunk[..., start:, None] == chunk[..., None, :]
    return same if same.dim() == 2 else same.unsqueeze(1)


def temperature(
    spec: ModelSpec, positions: Tensor | None, start: int, length: int, device: torch.device
) -> Tensor | None:
    """What multiplies the queries of layers without rotary embedding, fp32 [S, 1, 1] or [B, S, 1, 1]; None: nothing
    does."""
    if spec.query_temperature is None or spec.query_temperature_every is None:
        return None
    at = torch.arange(start, start + length, device=device) if positions is None else positions
    steps = ((at.float() + 1) / spec.query_temperature_every).floor()
    return (1 + spec.query_temperature * steps.log1p())[..., None, None]
