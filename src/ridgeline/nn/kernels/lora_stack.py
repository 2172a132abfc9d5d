"""LoRA adapters stacked in slots, and how a step's rows are cut into blocks of one adapter each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Segment = tuple[int, int, int]
"""A slot, the first of its rows, and the row behind the last one."""
LEAST_RANK = 16
"""As many rows as tensor cores take at least."""
_TILES = ((64, 8), (256, 16))
_LARGEST = 64


@dataclass
class Stack:
    """The adapters of linear layers that read one input, of which each is a slice of the outputs. Of a slot's A and B
    the first ``ranks`` rows are used."""

    a: Tensor
    """[slots, slices · capacity, in]."""
    b: Tensor
    """[slots, capacity, Σ outputs]: each slice's Bᵀ in its columns."""
    ranks: Tensor
    """int32 [slots, slices]; 0: the slice has no adapter."""
    scales: Tensor
    """fp32 [slots, slices]: what x Aᵀ is multiplied by."""
    widths: tuple[int, ...]
    """Outputs of each slice."""

    @property
    def capacity(self) -> int:
        """The largest rank that there is room for: a power of two, at least :data:`LEAST_RANK`."""
        return self.b.shape[1]


def tile(rows: int) -> int:
    """Most rows of a block in a step of ``rows``: few where each may have another adapter."""
    return next((size for most, size in _TILES if rows <= most), _LARGEST)


def cut(segments: Iterable[Segment], rows: int) -> list[Segment]:
    """Segments of a step of ``rows`` in blocks of up to :func:`tile` rows."""
    size = tile(rows)
    return [(slot, at, min(at + size, end)) for slot, first, end in segments for at in range(first, end, size)]


def most_cut(rows: int, segments: int) -> int:
    """Largest number of blocks of ``rows`` rows in at most ``segments`` segments."""
    size, reached = tile(rows), min(rows, segments)
    return (rows + reached * (size - 1)) // size
