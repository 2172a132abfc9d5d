"""Ternary weights in less than one bit each: a fixed dictionary of runs (QMoE, arXiv:2310.16795).

A row holds 0, its minimum or its maximum. Of Gaussian weights rounded in this way about 89 % are zero, and a sequence
of such symbols has an entropy of far less than one bit each. The codewords are the 2^16 most probable sequences of
pairs of symbols when a symbol is zero with probability 0.885, at most 14 pairs long; codeword number w is simply
written as 16 bits. A range coder would come closer to the entropy, but here any row is decoded by table look-ups alone,
all of its codewords at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ZEROS = 0.885
"""The probability of a zero for which the dictionary is built."""
PAIRS = 14
"""Maximum number of pairs of symbols in a codeword."""
WORDS = 1 << 16
EXPANDED = 1 << 20
"""Number of weights that are expanded at once in a product."""
VECTOR_LINES = 16
"""Maximum number of input rows for which a GPU decodes codewords while it multiplies, four rows for each decoding."""


@dataclass(frozen=True)
class Dictionary:
    """Codewords, most probable first. All prefixes of a codeword are codewords too."""

    symbols: Tensor
    """uint8 [words, 28]: 0 zero, 1 the row's minimum, 2 its maximum; 0 behind the end."""
    lengths: Tensor
    """uint8 [words], symbols in the word (two for each pair)."""
    longer: np.ndarray
    """int32 [words + 1, 9]: the word that is this one and one more pair, or -1; the last row: the words of one pair."""


@lru_cache(maxsize=1)
def dictionary() -> Dictionary:
    """The one dictionary, the same everywhere: ties go to the shorter word, then to the one with the smaller digits."""
    zero, other = math.log(ZEROS), math.log((1 - ZEROS) / 2)
    pair = np.array([(zero if d // 3 == 0 else other) + (zero if d % 3 == 0 else other) for d in range(9)])
    marks = np.array([(d // 3 > 0) + (d % 3 > 0) for d in range(9)])
    least = -8.0
    while True:  # every sequence at least as probable as e^least; the beginning of one is more probable than it
        level, found = (np.zeros(1), np.zeros((1, 0), np.int8), np.zeros(1, int)), []
        for depth in range(1, PAIRS + 1):
            grown = level[0][:, None] + pair
            parent, digit = np.nonzero(grown >= least)
            path = np.concatenate((level[1][parent], digit[:, None].astype(np.int8)), 1)
            level = (grown[parent, digit], path, level[2][parent] + marks[digit])
            # The probability from counts, so that words with the same counts tie exactly.
            score = level[2] * other + (2 * depth - level[2]) * zero
            found.append((score, np.pad(path, ((0, 0), (0, PAIRS - depth)), constant_values=-1)))
        score = np.concatenate([f[0] for f in found])
        if len(score) >= WORDS:
            break
        least -= 0.5
    paths = np.concatenate([f[1] for f in found])
    lengths = (paths >= 0).sum(1)
    order = np.lexsort((*paths.T[::-1], lengths, -score))[:WORDS]
    paths, lengths = paths[order], lengths[order]
    longer = np.full((WORDS + 1, 9), -1, np.int32)
    places = {path.tobytes(): i for i, path in enumerate(paths)}
    shorter = paths.copy()
    shorter[np.arange(WORDS), lengths - 1] = -1
    parents = [places.get(path.tobytes(), WORDS) for path in shorter]
    longer[parents, paths[np.arange(WORDS), lengths - 1]] = np.arange(WORDS)
    digits = np.maximum(paths, 0)
    symbols = np.stack((digits // 3, digits % 3), -1).reshape(WORDS, 2 * PAIRS).astype(np.uint8)
    return Dictionary(torch.from_numpy(symbols), torch.from_numpy((2 * lengths).astype(np.uint8)), longer)


@dataclass(frozen=True)
class Ternary:
    """A weight [out, in] whose rows hold 0, ``low`` and ``high``, in words of the dictionary."""

    codes: Tensor
    """int16 [words of all rows]: bit patterns of word numbers 0 … 65535."""
    offsets: Tensor
    """int32 [out + 1]: where each row's words begin."""
    low: Tensor
    """[out], in the dtype that is stored: what symbol 1 stands for."""
    high: Tensor
    """[out]: what symbol 2 stands for."""
    width: int

    @classmethod
    def encode(cls, symbols: Tensor, low: Tensor, high: Tensor) -> Ternary:
        """Symbols uint8 [out, in] in {0, 1, 2}, each row cut greedily into the longest words."""
        out, width = symbols.shape
        padded = F.pad(symbols.cpu(), (0, width % 2)).numpy()
        digits = padded[:, ::2] * 3 + padded[:, 1::2]
        codes, counts = [], []
        step = max(1, 8 * EXPANDED // max(1, width))
        for start in range(0, out, step):
            words, count = _encode(digits[start : start + step])
            codes.append(words)
            counts.append(count)
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int32)
        flat = np.concatenate(codes).astype(np.uint16).view(np.int16)
        device = symbols.device
        return cls(torch.from_numpy(flat).to(device), torch.from_numpy(offsets).to(device), low, high, width)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.low), self.width

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight: codewords, where rows begin, and their two values."""
        total = self.codes.nbytes + self.offsets.nbytes + self.low.nbytes + self.high.nbytes
        return 8 * total / (len(self.low) * self.width)

    def rows(self, start: int, stop: int) -> Ternary:
        """The record for some of the rows."""
        offsets = self.offsets[start : stop + 1]
        words = self.codes[int(offsets[0]) : int(offsets[-1])]
        return Ternary(words, offsets - offsets[0], self.low[start:stop], self.high[start:stop], self.width)

    def symbols(self) -> Tensor:
        """uint8 [out, in]."""
        book = dictionary()
        words = self.codes.int() & (WORDS - 1)
        table, lengths = book.symbols.to(words.device), book.lengths.to(words.device)[words]
        inside = torch.arange(2 * PAIRS, device=words.device, dtype=torch.uint8) < lengths[:, None]
        return table[words][inside].view(len(self.low), -1)[:, : self.width]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in]."""
        values = torch.stack((torch.zeros_like(self.low), self.low, self.high), 1).to(dtype)
        return values.gather(1, self.symbols().long())

    def blocks(self) -> Iterator[Ternary]:
        """Slices of consecutive rows, small enough that their decoded weights stay small."""
        step = max(1, EXPANDED // self.width)
        for start in range(0, len(self.low), step):
            yield self.rows(start, min(start + step, len(self.low)))

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ for ``x`` [..., in], decoded during the product: in registers (CUDA, few rows) or by blocks of expanded
        rows."""
        from ridgeline.nn.kernels.dispatch import has_triton

        lines = x.numel() // self.width
        if x.is_cuda and has_triton() and 0 < lines <= VECTOR_LINES:
            from ridgeline.nn.kernels.ternary_decode import ternary_product

            return ternary_product(x.reshape(lines, -1), self).to(x.dtype).view(*x.shape[:-1], -1)
        return torch.cat([F.linear(x, block.dense(x.dtype)) for block in self.blocks()], -1)


class TernaryLinear(nn.Module):
    """A frozen linear layer that stores its weight in codewords, and expands some rows at a time."""

    def __init__(self, code: Ternary, device: torch.device) -> None:
        super().__init__()
        self.width = code.width
        self.codes, self.offsets = _frozen(code.codes, device), _frozen(code.offsets, device)
        self.low, self.high = _frozen(code.low, device), _frozen(code.high, device)
        self.bias: nn.Parameter | None = None

    @property
    def code(self) -> Ternary:
        """The weight as it is stored."""
        return Ternary(self.codes, self.offsets, self.low, self.high, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        y = self.code.product(x)
        return y if self.bias is None else y + self.bias


def _frozen(t: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(t.to(device), requires_grad=False)


def _encode(digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(words of all rows one after the other, words of each row) of pairs 0 … 8, [rows, pairs].

    All rows walk the dictionary's tree side by side, a pair at a time; a row that cannot go on has found its word.
    """
    rows, pairs = digits.shape
    longer = dictionary().longer
    word = np.full(rows, WORDS, np.int32)
    found = np.empty((pairs, rows), np.uint16)
    ended = np.zeros((pairs, rows), bool)
    for t in range(pairs):
        digit = digits[:, t]
        onward = longer[word, digit]
        if t:
            found[t - 1] = word
            np.less(onward, 0, out=ended[t - 1])
        word = np.where(onward < 0, longer[WORDS, digit], onward)
    found[-1], ended[-1] = word, True
    return found.T[ended.T], ended.sum(0)
