"""Attention of a packed batch over a pool of slots: no padding, no gather, no separate phases.

A step's tokens are packed into one row; every sequence adds some new ones and attends to its older ones, which are
stored in the pool in a few extents (see :mod:`ridgeline.serve.block_manager`). Attention is computed extent by extent
on views of the pool and merged by the log-sum-exp of the scores, so nothing is copied (vLLM's paged attention,
arXiv:2309.06180, on extents; merging as in flash decoding). Packed rows without padding: ByteTransformer
(arXiv:2210.03052).

Shapes: T tokens of a step, H query heads, G key/value heads, D head dimension, L slots of an extent.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.nn.memory.step_pages import Pages, upload
from ridgeline.nn.model.attention import AttentionBackend, LayerCache, flash_attention, fused, naive_attention
from ridgeline.nn.model.flash_blocks import computable
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.rotary import Rope, rotate
from ridgeline.nn.quant.quantized_kv import KINDS, At

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in pages that are allocated when they are first written, so that a large pool costs no time."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


class PlainStore:
    """Unquantized keys or values, [1, G, slots, D]."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = _zeros(shape, dtype, device)

    def write(self, at: At, x: Tensor) -> None:
        """Store ``x`` [1, G, T, D] in the slots ``at``."""
        self.rows[:, :, at] = x

    def read(self, at: At, dtype: torch.dtype) -> Tensor:
        """Read the slots ``at``, [1, G, L, D]."""
        return self.rows[:, :, at]


GATHERED = 256
"""Extents with fewer slots are short, and gathered together with others."""


@dataclass(slots=True)
class Piece:
    """One sequence's part of a step: rows ``start`` to ``stop`` are its newest tokens; ``extents`` (first slot, slots)
    hold the older ones that they attend to, in order, and where ``own`` is False, the new ones too."""

    start: int
    stop: int
    extents: list[tuple[int, int]]
    own: bool
    """Whether new tokens are read from the step itself, not from the pool."""
    length: int = 0
    """Number of tokens of the sequence after the step."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """Its block table, for kernels that read it."""
    path: tuple[int, ...] = ()
    """Of one new token in a tree of drafts: the places of the newest tokens that it attends to, itself the last, behind
    all places before the first of them; empty: its places are in order."""
    _split: tuple[list[tuple[int, int]], Tensor | None] | None = field(default=None, init=False, repr=False)
    _biases: dict[int, Tensor] | None = field(default=None, init=False, repr=False)

    def split(self, device: torch.device) -> tuple[list[tuple[int, int]], Tensor | None]:
        """Extents that are read in place, and the slots of the others, if several are short: one call for each would
        take longer than gathering them. The same in all layers of a step."""
        if self._split is None:
            short = [extent for extent in self.extents if extent[1] < GATHERED]
            if len(short) < 2:
                self._split = (self.extents, None)
            else:
                slots = torch.cat([torch.arange(first, first + n, device=device) for first, n in short])
                self._split = ([extent for extent in self.extents if extent[1] >= GATHERED], slots)
        return self._split

    def bias(self, q: Tensor, total: int, window: int, causal: bool) -> Tensor:
        """What its new tokens ``q`` [1, H, S, D] see of ``total`` keys, as a bias [S, total] on their scores. The same
        in all layers of a ``window``."""
        self._biases = self._biases or {}
        if window not in self._biases:
            at = torch.arange(total, device=q.device)
            query = at[-q.shape[2] :, None]
            visible = at <= query if causal else (at >= 0).expand(len(query), -1)
            if window < 0:
                chunk = (at + (self.length or total) - total) // -window
                visible = visible & (chunk == chunk[-q.shape[2] :, None])
            elif window:
                visible = visible & (at > query - window)
            self._biases[window] = as_bias(visible, q.dtype)
        return self._biases[window]


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as numbers of the same shape that are added to scores: half of the least one where it is False."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min / 2)


@dataclass(slots=True)
class Singles:
    """The sequences of a step with one new token each, in the form that a kernel takes."""

    rows: Tensor
    """[B]: their rows."""
    table: Tensor
    """[B, blocks] int32."""
    lengths: Tensor
    """[B] int32."""
    block: int


Kernel = Callable[[Tensor, Any, Any, Singles, int, ScoreChanges | None], Tensor]
"""Attention of queries [B, H, D] over two stores, of keys and of values: (queries, keys, values, sequences, window,
changes of scores)."""
StepKernel = Callable[[Tensor, Any, Any, Pages, int, ScoreChanges | None], Tensor]
"""The same of all new tokens of a step, [T, H, D], whose keys and values are in the stores already (tensors, codes)."""


def table_of(pieces: list[Piece], block: int) -> tuple[np.ndarray, int]:
    """The block tables of pieces, int32 [B, blocks], and the slots of a block: where one has a path, tables of single
    slots."""
    if any(p.path for p in pieces):
        return _slot_table(pieces, block), 1
    used = [-(-p.length // block) for p in pieces]
    table = np.zeros((len(pieces), max(used)), dtype=np.int32)
    for row, p, n in zip(table, pieces, used, strict=True):
        row[:n] = np.frombuffer(p.blocks, dtype=np.int32, count=n)
    return table, block


def _slot_table(pieces: list[Piece], block: int) -> np.ndarray:
    """The slot of each token of pieces, int32 [B, tokens]."""
    table = np.zeros((len(pieces), max(p.length for p in pieces)), dtype=np.int32)
    within = np.arange(block, dtype=np.int32)
    known: dict[int, np.ndarray] = {}
    for row, p in zip(table, pieces, strict=True):
        slots = known.get(id(p.blocks))
        if slots is None:
            slots = (np.frombuffer(p.blocks, dtype=np.int32)[:, None] * block + within).ravel()
            known[id(p.blocks)] = slots
        before = p.path[0] if p.path else p.length
        row[:before] = slots[:before]
        row[before : p.length] = slots[list(p.path)] if p.path else ()
    return table


def singles(pieces: list[Piece], block: int, device: torch.device) -> Singles | None:
    """The kernel's arguments for the pieces with one new token; None if there are none."""
    some = [p for p in pieces if len(p.blocks) and p.stop - p.start == 1 and not p.own]
    if not some:
        return None
    table, each = table_of(some, block)
    rows, lengths = np.array([p.start for p in some]), np.array([p.length for p in some], dtype=np.int32)
    placed, tables, counts = upload(device, rows, table, lengths)
    return Singles(placed, tables, counts, each)


def first_seen(at: int, window: int) -> int:
    """The first token that one at place ``at`` of its sequence attends to. ``window``: how many of the newest; 0: all;
    negative: those of its own chunk of -window."""
    if window < 0:
        return at // -window * -window
    return max(0, at + 1 - window) if window else 0


@dataclass(slots=True)
class BatchLayout:
    """One step as attention sees it; the same for all layers."""

    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Slots for the new tokens' keys and values, [T]; empty: not stored (encoders)."""
    pieces: list[Piece] = field(default_factory=list)
    singles: Singles | None = None
    """The pieces of one new token, if a kernel processes them all at once."""
    kernel: Kernel | None = None
    pages: Pages | None = None
    """All pieces, for a kernel that processes them at once."""
    whole: StepKernel | None = None
    write: Callable[..., bool] | None = None
    """Writes keys and values to two stores at once, if it knows their codes: (keys, values, slots, k, v), and with
    (…, q, rope) turns keys on the way and queries in place."""
    causal: bool = True
    window: int = 0
    """What a token attends to in every layer (see :func:`first_seen`), to which extents are cut."""
    fused: bool = True
    """Whether attention computes no score matrix; if it does, sequence by sequence, ``kernel`` and ``whole`` are
    None."""
    outside: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Entered by each layer's attention, the only part whose operators depend on the batch."""
    real: Tensor | None = None
    """Which rows of a padded step hold tokens, [sequences, rows of each] bool; None: there is no padding."""
    rows: Tensor | None = None
    """Their numbers, where there is padding."""


class PagedCache(LayerCache):
    """A layer's part of the pool. ``layout`` describes the current step; the engine changes it in place."""

    def __init__(
        self, layout: BatchLayout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kind: str = "",
        window: int = 0, tensors: int = 2,
    ) -> None:  # fmt: skip
        """``shape``: [1, G, slots, D]; ``kind``: fp8, int8 or int4 for a quantized cache; ``window``: what a
        token attends to in this layer (see :func:`first_seen`); ``tensors``: 1 where values are the keys."""
        self.layout, self.window = layout, window
        self.length = 0
        make = KINDS[kind] if kind else lambda s, d: PlainStore(s, dtype, d)
        self.distinct = [make(shape, device) for _ in range(tensors)]
        self.stores = [self.distinct[0], self.distinct[-1]]

    @property
    def fresh(self) -> bool:
        """Whether the tokens of this step attend to tokens of this step only."""
        return self.layout.real is None and all(p.own and not p.extents for p in self.layout.pieces)

    @property
    def turns(self) -> bool:
        """See :class:`LayerCache`: where a kernel writes what is not turned yet."""
        layout = self.layout
        return layout.write is not None and layout.whole is not None and layout.real is None and len(layout.slots) > 0

    def store(self, x: Tensor) -> Tensor:
        """Store ``x`` [1, G, T, D], and return it as stored."""
        layout, store = self.layout, self.stores[0]
        if not len(layout.slots):
            return x
        store.write(layout.slots, x)
        return x if isinstance(store, PlainStore) else store.read(layout.slots, x.dtype)

    def attend_own(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attention of each sequence's new tokens to each other: ``q`` and ``k`` [1, H, T, D], ``v`` [1, H, T, V]."""
        with self.layout.outside:
            parts = [slice(piece.start, piece.stop) for piece in self.layout.pieces]
            return torch.cat([self._own(q[:, :, at], k[:, :, at], v[:, :, at]) for at in parts], 2)

    def attend(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``q`` [1, H, T, D], ``k`` and ``v`` [1, G, T, D] of a packed step → [1, H, T, D]; each sequence attends only
        to itself.

        ``backend`` is ignored, and of ``mask`` all but what happens to scores: the layout determines what is attended
        to.
        """
        layout, changes = self.layout, mask.changes
        with layout.outside:
            if layout.real is None:
                return self._packed(q, k, v, changes, mask.rope)
            if not layout.causal:
                return self._padded(q, k, v, layout.real)
            out, rows = torch.zeros_like(q), layout.rows
            out[:, :, rows] = self._packed(q[:, :, rows], k[:, :, rows], v[:, :, rows], changes)
            return out

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, changes: ScoreChanges | None, rope: Rope | None = None
    ) -> Tensor:
        layout = self.layout
        if len(layout.slots):
            held = [s.rows if isinstance(s, PlainStore) else s for s in self.stores]
            if layout.write is None or not layout.write(held[0], held[1], layout.slots, k, v, q, rope):
                if rope is not None:
                    q, k = (rotate(t.transpose(1, 2), rope).transpose(1, 2) for t in (q, k))
                for store, new in zip(self.distinct, (k, v), strict=False):
                    store.write(layout.slots, new)
            if layout.whole is not None and layout.pages is not None:
                found = layout.whole(q[0].transpose(0, 1), held[0], held[1], layout.pages, self.window, changes)
                return found.transpose(0, 1)[None]
            if not isinstance(self.stores[0], PlainStore):
                # Results must not depend on which step stored a token: quantized values are read back at once.
                k, v = (store.read(layout.slots, q.dtype) for store in self.stores)
        # Rows of a token next to each other, as the output projection needs them.
        out = torch.empty((q.shape[2], q.shape[1], q.shape[3]), dtype=q.dtype, device=q.device)
        at_once = layout.singles is not None
        if layout.singles is not None and layout.kernel is not None:
            s, (keys, values) = layout.singles, self.stores
            out[s.rows] = layout.kernel(q[0].transpose(0, 1)[s.rows], keys, values, s, self.window, changes)
        for piece in layout.pieces:
            n, rows = piece.stop - piece.start, slice(piece.start, piece.stop)
            if n == 1 and not piece.own:
                if at_once:
                    continue
                out[rows] = self._decode(q[:, :, rows], piece, changes)
            else:
                found = self._chunk(q[:, :, rows], k[:, :, rows], v[:, :, rows], piece, changes)
                out[rows] = found[0].transpose(0, 1)
        return out.transpose(0, 1)[None]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` [N] to ``target`` [N]."""
        for store in self.distinct:
            for held in vars(store).values():
                if isinstance(held, Tensor):
                    held[:, :, target] = held[:, :, source]

    def tensors(self) -> list[Tensor]:
        """The layer's part of the pool, [1, G, slots, ·] each."""
        return [t for store in self.distinct for t in vars(store).values() if isinstance(t, Tensor)]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's part of the pool."""
        return sum(t.nbytes for t in self.tensors())

    def _read(self, extent: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at = slice(extent[0], extent[0] + extent[1])
        return self.stores[0].read(at, dtype), self.stores[1].read(at, dtype)

    def _past(self, piece: Piece, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Cached keys and values of a sequence: long extents in place, short ones gathered into one."""
        long, slots = piece.split(self.layout.slots.device)
        parts = [self._read(extent, dtype) for extent in long]
        if slots is not None:
            parts.append((self.stores[0].read(slots, dtype), self.stores[1].read(slots, dtype)))
        return parts

    def _before(
        self, piece: Piece, dtype: torch.dtype, changes: ScoreChanges | None
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        """The same in order, where that matters."""
        if changes is None and not self._unseen(piece):
            return self._past(piece, dtype)
        return [self._read(extent, dtype) for extent in piece.extents]

    def _decode(self, q: Tensor, piece: Piece, changes: ScoreChanges | None) -> Tensor:
        """One new token, [1, H, 1, D] → [1, H, D]: heads that share a key head are the queries of one head."""
        if changes is not None or self._unseen(piece) or not self.layout.fused:
            keys, values = _joined(self._before(piece, q.dtype, changes))
            cut = self._unseen(piece)
            return self._seen(q, keys[:, :, cut:], values[:, :, cut:], None, changes)[:, :, 0]
        heads, width = q.shape[1], q.shape[3]
        q = q.reshape(1, self._groups, heads // self._groups, width)
        past = self._past(piece, q.dtype)
        if len(past) == 1:
            return fused(q, *past[0]).reshape(1, heads, width)
        return merge([attend(q, *pair) for pair in past]).reshape(1, heads, width)

    @property
    def _groups(self) -> int:
        store = self.stores[0]
        rows: Tensor = store.rows if isinstance(store, PlainStore) else store.codes
        return rows.shape[1]

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, changes: ScoreChanges | None) -> Tensor:
        """Several new tokens: all attend to earlier tokens, and each to new ones up to itself."""
        if changes is not None or self._unseen(piece) or not self.layout.fused:
            return self._masked(q, k, v, piece, changes)
        if not piece.extents:
            return self._own(q, k, v)
        parts = [attend(q, *pair) for pair in self._past(piece, q.dtype)]
        return merge([*parts, attend(q, k, v, causal=True)])

    def _unseen(self, piece: Piece) -> int:
        """Tokens of ``piece``, old and new, that its last one does not attend to."""
        total = sum(n for _, n in piece.extents) + (piece.stop - piece.start if piece.own else 0)
        length = piece.length or total
        return max(0, first_seen(length - 1, self.window) - (length - total))

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, changes: ScoreChanges | None) -> Tensor:
        """A sliding window cuts through the chunk, scores are changed, or are a matrix: older tokens are gathered, and
        a mask applies the window and causality."""
        keys, values = _joined([*self._before(piece, q.dtype, changes), (k, v)])
        return self._seen(q, keys, values, piece.bias(q, keys.shape[2], self.window, self.layout.causal), changes)

    def _own(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of several new tokens of a sequence to each other: ``q`` [1, H, S, D] → [1, H, S, V]."""
        causal = self.layout.causal
        if self.layout.fused:
            return fused(q, k, v, causal=causal, grouped=k.shape[1] < q.shape[1])
        at = torch.arange(q.shape[2], device=q.device)
        return self._seen(q, k, v, as_bias(at <= at[:, None], q.dtype) if causal else None, None)

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, changes: ScoreChanges | None) -> Tensor:
        """Attention of ``q`` [B, H, S, D] to ``k`` and ``v`` [B, G, L, D], of which ``bias`` ([S, L] or [B, 1, 1, L])
        tells those that are seen: [B, H, S, D]."""
        if changes is None and self.layout.fused:
            return fused(q, k, v, bias, grouped=k.shape[1] < q.shape[1])
        function = flash_attention if self.layout.fused else naive_attention
        return function(q, k, v, Mask(bias, False, changes=changes))

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """Padded encoders: every row of a sequence attends to its real tokens, using a mask; shapes as in
        ``attend``."""
        batch = real.shape[0]
        q, k, v = (t[0].unflatten(1, (batch, -1)).transpose(0, 1) for t in (q, k, v))  # [B, H, L, D]
        out = self._seen(q, k, v, as_bias(real[:, None, None], q.dtype), None)
        return out.transpose(0, 1).flatten(1, 2)[None]


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values of several parts of a sequence, [1, G, L, D] each."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [1, H, S, D] over ``k`` and ``v`` [1, G, L, D], and the scores' log-sum-exp [1, H, S]."""
    if q.device.type == "cpu":
        out, lse = _flash(*computable(q, k, v), 0.0, causal)
        return out.to(q.dtype), lse
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse[..., : q.shape[2]]


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over several sets of keys from that over each, weighted by their fractions of the whole softmax sum."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([lse for _, lse in parts])
    weights = (lse - lse.logsumexp(0)).exp()[..., None]
    return torch.stack([out.to(weights.dtype) for out, _ in parts]).mul_(weights).sum(0).to(parts[0][0].dtype)
