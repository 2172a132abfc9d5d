"""Gradients of queries, keys and values as the gradient of the merged product that they come from, in Triton: turned
back, side by side, with their largest magnitudes. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors
from ridgeline.nn.kernels.gpu_norms import magnitudes
from ridgeline.nn.kernels.peaks import PER_PROCESSOR, Peaks

TILE = 2048
"""Numbers of half of a head in a tile of rows."""


@triton.jit
def _gather_heads(q, k, v, out, cosine, sine, first, most_of_columns, rows, length, width, d, queries, keys, turned,
                  period, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
                  PEAKS: tl.constexpr, TALL: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """``out`` [rows, width] of q, k and v [batch, length, heads, d], of which the first ``turned`` heads are turned
    back. ``PEAKS``: the largest magnitudes of that are found, of the whole (1) or of rows and columns (2)."""
    heads = width // d
    half = d // 2
    at = tl.arange(0, HALF)
    most = tl.zeros([TALL], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TALL) * heads, tl.num_programs(0)):
        head = tile % heads
        i = (tile // heads).to(tl.int64) * TALL + tl.arange(0, TALL)
        inside = (i < rows)[:, None] & (at < half)[None, :]
        batch, row = i // length, i % length
        if head < queries:
            x = q + batch * q_batch + row * q_row + head * q_head
        elif head < queries + keys:
            x = k + batch * k_batch + row * k_row + (head - queries) * k_head
        else:
            x = v + batch * v_batch + row * v_row + (head - queries - keys) * v_head
        low = tl.load(x[:, None] + at[None, :], inside, other=0.0).to(tl.float32)
        high = tl.load(x[:, None] + half + at[None, :], inside, other=0.0).to(tl.float32)
        if head < turned:
            table = ((i % period) * d)[:, None] + at[None, :]
            c1 = tl.load(cosine + table, inside, other=0.0).to(tl.float32)
            c2 = tl.load(cosine + table + half, inside, other=0.0).to(tl.float32)
            s1 = -tl.load(sine + table, inside, other=0.0).to(tl.float32)
            s2 = -tl.load(sine + table + half, inside, other=0.0).to(tl.float32)
            before = low
            low = low * c1 + s1 * high
            high = high * c2 + s2 * before
        left, right = low.to(out.dtype.element_ty), high.to(out.dtype.element_ty)
        place = out + i[:, None] * width + head * d + at[None, :]
        tl.store(place, left, inside)
        tl.store(place + half, right, inside)
        if PEAKS:
            one, two = magnitudes(left), magnitudes(right)
            along = tl.max(tl.maximum(one, two), 1)
            if PEAKS == 2:
                tl.atomic_max(first + i, along, i < rows, sem="relaxed")
                column = most_of_columns + head * d + at
                tl.atomic_max(column, tl.max(one, 0), at < half, sem="relaxed")
                tl.atomic_max(column + half, tl.max(two, 0), at < half, sem="relaxed")
            else:
                most = tl.maximum(most, along)
    if PEAKS == 1:
        tl.store(first + tl.program_id(0), tl.max(most, 0))


def gather_heads(
    out: Tensor, parts: list[Tensor], rope: tuple[Tensor, Tensor] | None, turned: int, peaks: Peaks | None
) -> None:
    """``parts``: gradients of queries, keys and values [B, S, heads, D]; ``rope``: the tables by which the first
    ``turned`` heads were turned; ``out`` [B, S, Σ heads · D] and its ``peaks`` are written."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in parts)
    length, d, width = q.shape[1], q.shape[3], out.shape[-1]
    rows, half = out.numel() // width, triton.next_power_of_2(d // 2)
    tall = max(16, TILE // half)
    kind = 0 if peaks is None else 1 if peaks.columns is None else 2
    tiles = triton.cdiv(rows, tall) * (width // d)
    programs = min(tiles, PER_PROCESSOR * processors(out.device))
    if peaks is not None and kind == 1:
        programs = len(peaks.first)
    cosine, sine = (out, out) if rope is None else (t.contiguous() for t in rope)
    found = (out, out) if peaks is None else (peaks.first, out if peaks.columns is None else peaks.columns)
    _gather_heads[(programs,)](
        q, k, v, out, cosine, sine, *found, rows, length, width, d, q.shape[2], k.shape[2], turned if rope else 0,
        cosine.numel() // d if rope else 1, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], kind, tall, half,
        num_warps=8,
    )  # fmt: skip
