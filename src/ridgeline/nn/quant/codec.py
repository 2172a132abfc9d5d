"""Low-precision number formats: encoding tensors in them, and decoding.

Float8 (e4m3) with one scale per tensor (arXiv:2209.05433) or a power of two per row. A code is
``value · scale`` rounded to the format; dividing by the scale decodes it.

Blockwise 8-bit dynamic codes (arXiv:2110.02861; the map of arXiv:1511.04561): each block is divided by its largest
magnitude and rounded to the nearest of 256 values that are densest near zero.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.nn.kernels.dispatch import has_float8, has_triton, usable
from ridgeline.nn.kernels.peaks import GatedGradient, Peaks

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.float16: 65504.0}
"""Largest finite value of each format."""


def scale_for(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale (float32, shaped as ``peak``) that brings the largest magnitude ``peak`` to the format's largest.

    1 where the peak is zero; NaN where it is not finite, so that an overflow shows in everything that is decoded.
    At most 2^60, so that products of two scales stay finite.
    """
    peak = peak.float()
    scale = torch.where(peak > 0, (LARGEST[dtype] / peak).clamp(max=2.0**60), torch.ones_like(peak))
    return scale.masked_fill(~torch.isfinite(peak), float("nan"))


def peak_of(t: Tensor) -> Tensor:
    """Largest magnitude of a tensor (float32 scalar); zero for an empty one. NaN if it holds any."""
    if not t.numel():
        return torch.zeros((), device=t.device)
    least, most = torch.aminmax(t)
    return torch.maximum(-least, most).float()


def encode(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``t · scale`` rounded to nearest in ``dtype``; finite values saturate at its largest."""
    most = LARGEST[dtype]
    return (t.float() * scale).clamp_(-most, most).to(dtype)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes → values in ``dtype``."""
    return codes.to(torch.float32).div_(scale).to(dtype)


def quantize(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of ``t`` in ``dtype`` with a scale of its own (float32 scalar): (codes, scale)."""
    return quantize_with_inverse(t, dtype)[:2]


def _encodes(t: Tensor) -> bool:
    """Whether kernels of ours encode it: on a GPU that has float8."""
    return t.is_cuda and has_triton() and usable(t) and has_float8(t.device)


def encodes_gated(both: Tensor) -> bool:
    """Whether they also encode SwiGLU's gradient from what it is made of, among it ``both`` [m, 2·k], as it is and
    transposed: of whole blocks of rows in 16 bits, which every Triton transposes right."""
    return len(both) > 0 and len(both) % 16 == 0 and both.dtype in (torch.bfloat16, torch.float16) and _encodes(both)


def quantize_with_inverse(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the scale's inverse. In two kernels on a GPU that has float8."""
    if t.numel() and _encodes(t):
        from ridgeline.nn.kernels import float8

        return float8.encode(t, dtype, LARGEST[dtype])
    scale = scale_for(peak_of(t), dtype)
    return encode(t, scale, dtype), scale, scale.reciprocal()


class Layouts(NamedTuple):
    """Codes of a matrix [m, k] as they are and transposed, as float8 products read operands along rows, each with the
    inverse of its scale, by which codes are multiplied (fp32): a scalar, or [m, 1] and [k, 1]."""

    rows: Tensor
    inverse_scale: Tensor
    transposed: Tensor | None
    """[k, m]; None: not asked for."""
    transposed_inverse_scale: Tensor | None


def layouts(
    t: Tensor | GatedGradient, dtype: torch.dtype, rowwise: bool = False, transpose: bool = True,
    known: Peaks | None = None,
) -> Layouts:  # fmt: skip
    """Codes of ``t`` [m, k], with ``transpose`` also transposed. ``rowwise``: each row, and for the transposed codes
    each column, has a scale of its own, a power of two: the largest that lets no magnitude exceed the format's.
    ``known``: peaks of ``t``. A :class:`GatedGradient` must be one that :func:`encodes_gated` allows."""
    most = LARGEST[dtype]
    if isinstance(t, GatedGradient):
        from ridgeline.nn.kernels import float8_gated

        return Layouts(*float8_gated.encode_gated(t, dtype, most, "lines" if rowwise else "whole"))
    fast = t.numel() > 0 and _encodes(t)
    if fast and (rowwise or transpose):
        from ridgeline.nn.kernels import float8

        if rowwise:
            return Layouts(*float8.encode_rowwise(t, dtype, most, transpose, known))
        rows, transposed, inverse = float8.encode_transposed(t, dtype, most, known)
        return Layouts(rows, inverse, transposed, inverse)
    if not rowwise:
        rows, _, inverse = quantize_with_inverse(t, dtype)
        return Layouts(rows, inverse, rows.t() if transpose else None, inverse)
    rows, inverse = _coded_rows(t, dtype)
    return Layouts(rows, inverse, *(_coded_rows(t.t(), dtype) if transpose else (None, None)))


def _coded_rows(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the inverse of each row's scale [m, 1]."""
    peaks = t.abs().amax(1, True).float() if t.shape[1] else torch.zeros(len(t), 1, device=t.device)
    scale = scale_for(peaks, dtype)
    power = (scale.view(torch.int32) & 0x7F800000).view(torch.float32).masked_fill_(scale.isnan(), float("nan"))
    return encode(t, power, dtype), power.reciprocal()


# ---- blockwise 8-bit dynamic codes ----------------------------------------------------------------------------------

_AT_ONCE = 1 << 17
"""Number of elements that are encoded at once on a CPU: their temporaries stay in its caches."""


@lru_cache(maxsize=8)
def dynamic_map(signed: bool = True, device: torch.device | None = None) -> Tensor:
    """The 256 values of the dynamic code, ascending in [-1, 1] (``signed``) or [0, 1] (arXiv:1511.04561, section 3).

    Seven decades down from 1; each finer one has half the values. Within a decade they are the means of equal spans.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1)
        means = (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += means
        values += [-m for m in means] if signed else []
    return torch.tensor(sorted(values), device=device)


@lru_cache(maxsize=8)
def search_tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The nearest code by two look-ups (uint8 [65536], fp32 [256]): from a number's upper 16 bits, the code of the
    smallest number that has them; from that code, the midpoint beyond which it is the next one. No 16 bits span two
    midpoints.
    """
    values = dynamic_map(signed)
    midpoints = (values[1:] + values[:-1]) / 2
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    smallest = ((upper << 16) | (upper < 0).int() * 0xFFFF).view(torch.float32)  # negative: largest magnitude
    first = torch.bucketize(smallest.nan_to_num(0.0), midpoints, out_int32=True)
    return first.to(torch.uint8).to(device), torch.cat((midpoints, torch.tensor([torch.inf]))).to(device)


@torch.no_grad()
def encode_blockwise8(x: Tensor, signed: bool = True, block: int = 256) -> tuple[Tensor, Tensor]:
    """Codes of ``x``: (uint8 shaped as ``x``, each block's largest magnitude as fp32 [ceil(numel / block)]).

    Blocks run over ``x`` in its flattened order; the last may be short. ``signed`` False: ``x`` must not be negative.
    What is not finite makes its whole block NaN when decoded.
    """
    first, midpoints = search_tables(signed, x.device)
    flat = x.detach().reshape(-1)
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=x.device)
    peaks = torch.empty(-(-flat.numel() // block), device=x.device)
    step = max(1, _AT_ONCE // block) * block if x.device.type == "cpu" else max(1, flat.numel())
    for at in range(0, flat.numel(), step):
        rows = _in_blocks(flat[at : at + step], block)
        peak = peaks[at // block : at // block + len(rows)]
        torch.amax(rows.abs(), 1, out=peak)
        scaled = (rows / peak.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).view(-1)
        code = first.index_select(0, (scaled.view(torch.int32) >> 16).add_(1 << 15))
        code += scaled > midpoints.index_select(0, code.int())
        codes[at : at + step] = code[: len(flat) - at]
    return codes.view(x.shape), peaks


@torch.no_grad()
def decode_blockwise8(
    codes: Tensor, peaks: Tensor, signed: bool = True, block: int = 256, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What :func:`encode_blockwise8` coded, in ``dtype``, shaped as ``codes``."""
    values = dynamic_map(signed, codes.device)
    flat = codes.reshape(-1)
    out = torch.empty(flat.numel(), dtype=dtype, device=codes.device)
    step = max(1, _AT_ONCE // block) * block if codes.device.type == "cpu" else max(1, flat.numel())
    for at in range(0, flat.numel(), step):
        found = _in_blocks(values.index_select(0, flat[at : at + step].int()), block)
        found *= peaks[at // block : at // block + len(found)].unsqueeze(1)
        out[at : at + step] = found.view(-1)[: len(flat) - at]
    return out.view(codes.shape)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """fp32 [blocks, block] of a vector; a short last block is filled with zeros."""
    missing = -len(flat) % block
    flat = flat.float()
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, block)
