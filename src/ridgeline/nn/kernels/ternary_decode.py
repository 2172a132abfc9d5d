"""Products with ternary weights in words of QMoE's dictionary (arXiv:2310.16795, section 3.3) in Triton, for CUDA
devices: words are decoded in registers, and the weight is never in memory.

A program takes one row of the weight. It reads its words some at a time, looks their symbols up (64 bits a word, 512
KiB in all, which stays in the second-level cache), and finds the columns where they begin from a running sum of their
lengths. Sums are fp32. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.quant.ternary import Ternary, dictionary

_LINES = 4
"""Most rows of inputs in one program."""
_AT_ONCE = 32
"""Words of one step of a program."""
_LENGTH_BIT = 58
"""Where the length stands in a dictionary entry, above 28 symbols of two bits."""


@triton.jit
def _row(x, codes, offsets, low, high, book, y, width, out, lines, LINES: tl.constexpr, WORDS: tl.constexpr,
         LENGTH_BIT: tl.constexpr):  # fmt: skip
    """One row of the weight times ``LINES`` rows of inputs."""
    n = tl.program_id(0)
    end = tl.load(offsets + n + 1)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    symbol = tl.arange(0, 32)
    below = tl.zeros([LINES], tl.float32)
    above = tl.zeros([LINES], tl.float32)
    column = 0
    for start in range(tl.load(offsets + n), end, WORDS):
        at = start + tl.arange(0, WORDS)
        code = tl.load(codes + at, at < end, other=0).to(tl.int32) & 0xFFFF
        word = tl.load(book + code, at < end, other=0)
        length = ((word >> LENGTH_BIT) & 31).to(tl.int32)
        columns = (column + tl.cumsum(length, 0) - length)[:, None] + symbol[None, :]
        what = ((word[:, None] >> (2 * symbol)[None, :].to(tl.int64)) & 3).to(tl.int32)
        there = (symbol[None, :] < length[:, None]) & (columns < width) & (what > 0)
        mine = there[None, :, :] & (line < lines)[:, None, None]
        a = tl.load(x + line[:, None, None] * width + columns[None, :, :], mine, other=0.0).to(tl.float32)
        below += tl.sum(tl.sum(tl.where((what == 1)[None, :, :], a, 0.0), 2), 1)
        above += tl.sum(tl.sum(tl.where((what == 2)[None, :, :], a, 0.0), 2), 1)
        column += tl.sum(length, 0)
    least, most = tl.load(low + n).to(tl.float32), tl.load(high + n).to(tl.float32)
    tl.store(y + line * out + n, below * least + above * most, line < lines)


@lru_cache(maxsize=8)
def _book(device: torch.device) -> Tensor:
    """int64 [words]: symbols of two bits, the first lowest, and the word's length."""
    words = dictionary()
    shifts = 2 * torch.arange(words.symbols.shape[1])
    packed = (words.symbols.long() << shifts).sum(1) | (words.lengths.long() << _LENGTH_BIT)
    return packed.to(device)


def ternary_product(x: Tensor, code: Ternary) -> Tensor:
    """``x`` [M, in] (fp32, bf16 or fp16) times the weight [out, in] → [M, out] fp32."""
    x = x.contiguous()
    (out, width), lines = code.shape, len(x)
    y = torch.empty(lines, out, dtype=torch.float32, device=x.device)
    at_once = min(_LINES, triton.next_power_of_2(lines))
    grid = (out, triton.cdiv(lines, at_once))
    _row[grid](x, code.codes, code.offsets, code.low, code.high, _book(x.device), y, width, out, lines, LINES=at_once,
               WORDS=_AT_ONCE, LENGTH_BIT=_LENGTH_BIT, num_warps=4)  # fmt: skip
    return y
