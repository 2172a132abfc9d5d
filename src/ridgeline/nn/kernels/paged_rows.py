"""What kernels of attention over a paged pool share, in Triton: the rows of a program, the keys that they see, what a
model does to scores, and how results are left. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.nn.kernels.early import prefetch, wait


@triton.jit
def rows_and_keys(work, table, lengths, starts, repeat, window, splits, CHUNKED: tl.constexpr, ROWS: tl.constexpr,
                  TILE: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Of a program: its sequence, and that one's length and first new token; of its ``ROWS`` rows the new token, the
    head, whether they exist, their position, that of the first one, and the oldest key that they see; and the keys of
    its part, from the first of a tile to the end."""
    g, s = tl.program_id(1), tl.program_id(2)
    if EARLY:  # which the weights of a layer have pushed out of the cache since the layer before
        prefetch(work + tl.program_id(0) * 2)
        prefetch(lengths)
        prefetch(starts)
        prefetch(table)
    wait(EARLY)
    b = tl.load(work + tl.program_id(0) * 2)
    first_row = tl.load(work + tl.program_id(0) * 2 + 1)
    length, start = tl.load(lengths + b), tl.load(starts + b)
    count = tl.load(starts + b + 1) - start
    rows = first_row + tl.arange(0, ROWS)
    query, head = rows // repeat, g * repeat + rows % repeat
    position = length - count + query
    # What the first row and the last one see bounds the keys.
    seen = tl.minimum(length - count + (first_row + ROWS - 1) // repeat, length - 1) + 1
    seen = tl.where(first_row < count * repeat, seen, 0)
    first = length - count + first_row // repeat
    least = tl.maximum(0, first)
    least = least // window * window if CHUNKED else tl.maximum(0, least + 1 - window)
    begin = least // TILE * TILE
    oldest = position // window * window if CHUNKED else position - window + 1
    part = tl.maximum(tl.cdiv(tl.cdiv(seen - begin, TILE), splits), LEAST) * TILE
    begin += s * part
    end = tl.minimum(begin + part, seen)
    return b, length, start, query, head, query < count, position, first, oldest, begin, end


@triton.jit
def leave(out, acc, stats, low, high, peak, total, line, wide, mine, there, splits, AXIS: tl.constexpr,
          SPLIT: tl.constexpr, HALVES: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    """Store a program's sums of values, ``low`` and of the other half of a head ``high`` (``HALVES``), whose dimension
    ``AXIS`` are numbers of a head, at ``wide``, and the other one rows, at ``line``: divided by the sum of weights,
    ``total``, or, of a part of the keys (``SPLIT``), with that and the largest score, ``peak``. ``mine``: rows that
    exist, ``there``: their numbers."""
    WIDTH: tl.constexpr = STORED * 2 if HALVES else STORED
    sums, part = tl.expand_dims(total, AXIS), line * splits + tl.program_id(2)
    if SPLIT:
        to = acc + tl.expand_dims(part, AXIS) * WIDTH + wide
        tl.store(to, low, there & (sums > 0))
        if HALVES:
            tl.store(to + STORED, high, there & (sums > 0))
        tl.store(stats + part * 2, peak, mine)
        tl.store(stats + part * 2 + 1, total, mine)
    else:
        to = out + tl.expand_dims(line, AXIS) * WIDTH + wide
        tl.store(to, (low / sums).to(out.dtype.element_ty), there)
        if HALVES:
            tl.store(to + STORED, (high / sums).to(out.dtype.element_ty), there)


@triton.jit
def changed(scores, n, length, slope, scale, cap, CAPPED: tl.constexpr, SLOPES: tl.constexpr):
    """Scores with what a model does to them, and by what they are to be multiplied yet. ``n``: keys, and ``slope``: of
    heads, both broadcastable to the scores."""
    if CAPPED or SLOPES:
        scores *= scale
        if CAPPED:
            turned = tl.exp(-2.0 * tl.abs(scores) / cap)
            size = cap * (1.0 - turned) / (1.0 + turned)
            scores = tl.where(scores < 0, -size, size)
        if SLOPES:
            scores += slope * (n + 1 - length).to(tl.float32)
        return scores, 1.4426950408889634
    else:
        return scores, scale * 1.4426950408889634
