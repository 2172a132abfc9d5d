"""Attention of single new tokens over a paged pool by the compiled CPU kernel, from plain values or from codes."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.nn.kernels import native
from ridgeline.nn.memory.kv_pool import PlainStore, Singles
from ridgeline.nn.model.mask import ScoreChanges
from ridgeline.nn.quant.quantized_kv import ByteCodes, Codes, NibbleCodes


def cpu_paged_attention(q: Tensor, keys: PlainStore | Codes, values: PlainStore | Codes, s: Singles, window: int,
                        changes: ScoreChanges | None) -> Tensor:  # fmt: skip
    """Attention of ``q`` [B, H, D] over the pages of its sequences → [B, H, D]."""
    held = keys.rows if isinstance(keys, PlainStore) else keys.codes
    groups, slots = held.shape[1], held.shape[2]
    pages = native.Pages(s.table.data_ptr(), s.lengths.data_ptr(), s.table.shape[1], s.block, slots, 0)
    scaled = q.to(torch.float32, memory_format=torch.contiguous_format) * q.shape[2] ** -0.5
    given, _held = described_changes(changes)
    found = described(keys), described(values)
    return native.paged_attention(scaled.contiguous(), *found, pages, groups, window, given).to(q.dtype)


def described_changes(changes: ScoreChanges | None) -> tuple[native.Changes, list[Tensor]]:
    """What the kernels do to scores, and the tensors that it points to."""
    if changes is None:
        return native.Changes(None, None, 0.0), []
    slopes = None if changes.slopes is None else torch.tensor(changes.slopes, dtype=torch.float32)
    sinks = None if changes.sinks is None else changes.sinks.detach().float().contiguous()
    held = [t for t in (slopes, sinks) if t is not None]
    first, second = (None if t is None else t.data_ptr() for t in (slopes, sinks))
    return native.Changes(first, second, changes.soft_cap or 0.0), held


def described(store: PlainStore | Codes) -> native.Cache:
    """The store as the kernels read it."""
    if isinstance(store, PlainStore):
        return native.Cache(store.rows.data_ptr(), None, None, 0, native.TYPES[store.rows.dtype])
    if isinstance(store, ByteCodes):
        return native.Cache(store.codes.data_ptr(), store.scale.data_ptr(), None, 1, 0)
    if isinstance(store, NibbleCodes):
        return native.Cache(store.codes.data_ptr(), store.scale.data_ptr(), store.least.data_ptr(), 2, store.group)
    return native.Cache(store.codes.data_ptr(), None, None, 3, 0)
