"""A step's sequences as a kernel that takes all of them reads them, and numbers from the host without waiting.

Rows are (new token · heads of a key head + head) of one sequence and one key head, which a program takes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.spec.scheduling import FEW_ROWS


class Launch(NamedTuple):
    """Which rows one launch of the kernel takes: those of sequences with few of them, or with many."""

    items: list[tuple[int, int]]
    """Sequences, and the first of their rows that a program takes."""
    rows: int
    """Rows of an item: a power of two, 16 or more."""
    used: int
    """The most of them that any item has."""
    split: bool
    """Whether keys are split over programs."""


@dataclass(frozen=True)
class Work:
    """A :class:`Launch` on the device."""

    items: Tensor
    """int32 [W, 2]."""
    rows: int
    used: int
    split: bool


@dataclass(frozen=True)
class Pages:
    """The sequences of a step, on the device."""

    table: Tensor
    """int32 [B, blocks]: their blocks."""
    lengths: Tensor
    """int32 [B]: their tokens, new ones included."""
    starts: Tensor
    """int32 [B + 1]: the rows of the step at which their new tokens begin, one sequence after the other."""
    block: int
    """Slots of a block."""
    work: tuple[Work, ...]
    new: Sequence[int]
    """New tokens of each, as the host knows them."""
    held: Sequence[int] = ()
    """``lengths``, as the host knows them; empty in a captured step, which has others when it is replayed."""

    @property
    def most(self) -> int:
        """New tokens of the sequence that has most."""
        return max(self.new)

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one new token."""
        return set(self.new) == {1}


def most_rows(width: int, kind: str) -> int:
    """Most rows of a program, as many as registers hold: of heads of ``width``, over a pool of ``kind`` (``int4``, …;
    empty: plain)."""
    return 128 if width <= 128 and kind != "int4" else 64


def fewest_rows(used: int) -> int:
    """Rows of a program for ``used`` of them: a power of two, 16 or more."""
    return max(16, 1 << (used - 1).bit_length())


def launches(counts: Sequence[int], repeat: int, width: int, kind: str, few: int = FEW_ROWS) -> list[Launch]:
    """What sequences with ``counts`` new tokens are divided into: those of up to ``few`` rows, and the others. Their
    key heads have ``repeat`` heads of ``width`` each, and their pool is of ``kind``."""
    found = []
    for many in (False, True):
        mine = [(b, n * repeat) for b, n in enumerate(counts) if n and (n * repeat > few) == many]
        if mine:
            most = max(n for _, n in mine)
            rows = most_rows(width, kind) if many else fewest_rows(most)
            items = [(b, first) for b, n in mine for first in range(0, n, rows)]
            found.append(Launch(items, rows, min(most, rows), not many))
    return found


def make_pages(
    table: Tensor, lengths: Tensor, counts: Sequence[int], block: int, repeat: int, width: int, kind: str = ""
) -> Pages:
    """:class:`Pages` of sequences with ``counts`` new tokens each, as :func:`launches` divides them."""
    device = table.device
    work = [
        Work(torch.tensor(d.items, dtype=torch.int32).to(device), d.rows, d.used, d.split)
        for d in launches(counts, repeat, width, kind)
    ]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    held = [] if lengths.is_meta else lengths.tolist()
    return Pages(table, lengths, starts, block, tuple(work), counts, held)


def upload(device: torch.device, *arrays: np.ndarray | Sequence[int]) -> list[Tensor]:
    """Arrays of int64 or int32 (lists: int64) on the device, by one copy for which the host does not wait; a CPU
    reads them where they are."""
    given = [np.ascontiguousarray(a, dtype=None if isinstance(a, np.ndarray) else np.int64) for a in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in given]
    order = sorted(range(len(given)), key=lambda i: -given[i].itemsize)  # the wide ones first, so that all are aligned
    whole = torch.from_numpy(np.concatenate([given[i].ravel().view(np.uint8) for i in order]))
    whole = whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)
    found: dict[int, Tensor] = {}
    at = 0
    for i in order:
        dtype = torch.int64 if given[i].itemsize == 8 else torch.int32
        found[i] = whole[at : at + given[i].nbytes].view(dtype).view(given[i].shape)
        at += given[i].nbytes
    return [found[i] for i in range(len(given))]
