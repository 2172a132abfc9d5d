"""4-bit NormalFloat with doubly quantized scales (QLoRA, arXiv:2305.14314, section 3).

A weight [out, in] is cut into blocks of 64 along each row; a row's last block may be short. A block is divided by its
largest magnitude and rounded to the nearest of 16 values. These largest magnitudes are themselves coded in 8 bits:
less their mean over the row, in the dynamic code, by the largest one of the row. So everything that is stored has the
weight's rows, and any cut between rows or between blocks leaves whole blocks. The paper's second level has blocks of
256 wherever they fall; ours are rows, which is the same at width 16384.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.dispatch import on_gpu
from ridgeline.nn.quant.codec import decode_blockwise8, dynamic_map, encode_blockwise8
from ridgeline.nn.quant.quantized import QuantizedLinear

if TYPE_CHECKING:
    from ridgeline.nn.model.own_kernels import Both

BLOCK = 64
BYTES = 0.5 + 1 / BLOCK + 4
"""Memory traffic of expanding one weight to fp32: its code and its share of the scale read, the weight written."""
_WRITTEN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which the kernel writes weights."""
_AT_ONCE = 1 << 14
"""Bytes of codes that are expanded at once on a CPU: their temporaries stay in its caches."""


@lru_cache(maxsize=8)
def codebook(device: torch.device | None = None) -> Tensor:
    """The 16 values, ascending from -1 to 1 (fp32): quantiles of a normal distribution with an exact zero.

    Eight positive and seven negative ones at even steps of probability, from half to the mean of what 16 and 15 values
    would leave at the ends (arXiv:2305.14314, section 3 and appendix E).
    """
    last = 1 - (1 / 32 + 1 / 30) / 2
    positive: Tensor = torch.special.ndtri(torch.linspace(0.5, last, 9, dtype=torch.float64)[1:])
    negative: Tensor = -torch.special.ndtri(torch.linspace(0.5, last, 8, dtype=torch.float64)[1:]).flip(0)
    values = torch.cat((negative, torch.zeros(1, dtype=torch.float64), positive)) / positive[-1]
    return values.to(device, torch.float32)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """What each byte stands for, two fp32 values, as one 8-byte element: a look-up moves both at once."""
    values, byte = codebook(), torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), -1).view(torch.float64).view(-1).to(device)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``weight`` [out, in], ``in`` even, and its blocks' largest magnitudes.

    Returns (codes, peaks): uint8 [out, in/2], the first of two codes in the upper half; fp32 [out, ceil(in/64)].
    """
    rows, width = weight.shape
    missing = -width % BLOCK
    blocks = nn.functional.pad(weight.float(), (0, missing)).view(rows, -1, BLOCK)
    peaks = blocks.abs().amax(-1)
    values = codebook(weight.device)
    scaled = blocks / peaks.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    codes = codes.view(rows, -1)[:, :width]
    return (codes[:, ::2] << 4) | codes[:, 1::2], peaks


def quantize_peaks(peaks: Tensor) -> tuple[Tensor, Tensor]:
    """The second quantization, of [out, blocks]: (scales, spans), uint8 [out, blocks] and uint8 [out, 8].

    ``spans`` are two fp32 numbers per row, its largest deviation and its mean, as bytes: no policy that casts
    parameters touches them.
    """
    mean = peaks.mean(1, keepdim=True)
    scales, largest = encode_blockwise8(peaks - mean, block=peaks.shape[1])
    return scales, torch.cat((largest.unsqueeze(1), mean), 1).view(torch.uint8)


def dequantize_peaks(scales: Tensor, spans: Tensor) -> Tensor:
    """fp32 [out, blocks]: the inverse of :func:`quantize_peaks`. Of a part of the rows' blocks too."""
    largest, mean = spans.view(torch.float32).unbind(1)
    return decode_blockwise8(scales, largest.contiguous(), block=scales.shape[1]).add_(mean.unsqueeze(1))


def dequantize(codes: Tensor, scales: Tensor, spans: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [out, in] in ``dtype`` from :func:`quantize`'s codes and :func:`quantize_peaks`' scales: by one kernel on
    a GPU, with the same results."""
    if on_gpu(codes) and dtype in _WRITTEN and _is_right(codes.device):
        return _by_kernel(codes, scales, spans, dtype)
    return expand(codes, dequantize_peaks(scales, spans), dtype)


def _is_right(device: torch.device) -> bool:
    from ridgeline.nn.model import own_kernels

    return own_kernels.is_right("NF4 weights", device, trial)


def _by_kernel(codes: Tensor, scales: Tensor, spans: Tensor, dtype: torch.dtype) -> Tensor:
    from ridgeline.nn.kernels.nf4_codes import expand_nf4

    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    if out.numel():
        values = codebook(codes.device), dynamic_map(True, codes.device)
        expand_nf4(codes, scales.contiguous(), spans.contiguous().view(torch.float32), *values, out, BLOCK)
    return out


def trial(device: torch.device) -> Both:
    """A small matrix whose rows' last blocks are short."""
    weight = torch.randn(70, 200, generator=torch.Generator(device).manual_seed(0), device=device)
    codes, peaks = quantize(weight)
    scales, spans = quantize_peaks(peaks)
    return (
        lambda: _by_kernel(codes, scales, spans, torch.bfloat16),
        lambda: expand(codes, dequantize_peaks(scales, spans)),
    )


def expand(codes: Tensor, peaks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [out, in] in ``dtype``: the inverse of :func:`quantize`."""
    rows, half = codes.shape
    out = torch.empty(rows, 2 * half, dtype=dtype, device=codes.device)
    pairs = _pairs(codes.device)
    step = max(1, _AT_ONCE // half) if codes.device.type == "cpu" else rows
    even = 2 * half % BLOCK == 0
    for at in range(0, rows, step):
        into, some = out[at : at + step], peaks[at : at + step]
        found = into if dtype == torch.float32 else torch.empty(into.shape, device=codes.device)
        torch.index_select(pairs, 0, codes[at : at + step].reshape(-1).int(), out=found.view(torch.float64).view(-1))
        if even:
            found.view(len(found), -1, BLOCK).mul_(some.unsqueeze(-1))
        else:
            found.mul_(some.repeat_interleave(BLOCK, 1)[:, : 2 * half])
        if found is not into:
            into.copy_(found)
    return out


class NF4Linear(QuantizedLinear):
    """A frozen linear layer in 4-bit NormalFloat. ``in_features`` must be even."""

    stored = ("codes", "scales", "spans")

    @staticmethod
    def expand(*stored: Tensor, dtype: torch.dtype) -> Tensor:
        """See :func:`dequantize`."""
        codes, scales, spans = stored
        return dequantize(codes, scales, spans, dtype)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        codes, peaks = quantize(linear.weight.detach())
        scales, spans = quantize_peaks(peaks)
        self.keep(codes=codes, scales=scales, spans=spans)

    def cut_by_input(self, name: str) -> bool:
        """A row's mean and largest deviation belong to every part of it."""
        return name != "spans"
