"""Tensors that lie side by side in one storage, as one: the merged weights of projections that read one input."""

from __future__ import annotations

import torch
from torch import Tensor


def adjacent(parts: list[Tensor]) -> Tensor | None:
    """Matrices [n_i, k] (or vectors) that are consecutive in one storage, as one [Σ n_i, k]; None if they are not."""
    first = parts[0]
    place = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for p in parts:
        if not (
            type(p) in (Tensor, torch.nn.Parameter)
            and p.is_contiguous()
            and p.dtype == first.dtype
            and p.untyped_storage().data_ptr() == storage
            and p.storage_offset() == place
        ):
            return None
        place += p.numel()
    rows = sum(p.shape[0] for p in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def adjacent_columns(parts: list[Tensor]) -> Tensor | None:
    """Matrices [g, n_i] that are neighboring columns of one matrix, as these: [g, Σ n_i]; None if they are not."""
    first, width = parts[0], sum(p.shape[1] for p in parts)
    storage, place, row = first.untyped_storage().data_ptr(), first.storage_offset(), first.stride(0)
    for p in parts:
        same = p.dtype == first.dtype and p.shape[0] == first.shape[0] and p.stride() == (row, 1)
        if not same or p.untyped_storage().data_ptr() != storage or p.storage_offset() != place:
            return None
        place += p.shape[1]
    if first.shape[0] > 1 and row < width:
        return None
    return first.detach().as_strided((first.shape[0], width), (row, 1), first.storage_offset())
