"""Encoding tensors in float8 in Triton, for CUDA devices that have it (compute capability 8.9 and later): one pass
finds the largest magnitude, one writes codes and scale, where PyTorch's operators take some twenty. Imported only where
Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors

BLOCK = 4096


@triton.jit
def _peaks(x, peaks, n, BLOCK: tl.constexpr):
    """The largest magnitude of each program's part, as the bits of a float, in whose order NaN is above infinity."""
    most = tl.zeros([BLOCK], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(x + at, at < n, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(peaks + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _encode(x, peaks, codes, scales, n, count, LARGEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``codes`` of x, and ``scales``: what values were multiplied by, and its inverse."""
    part = tl.arange(0, PARTS)
    bits = tl.max(tl.load(peaks + part, part < count, other=0), 0)
    peak = bits.to(tl.float32, bitcast=True)
    scale = tl.minimum(LARGEST / tl.where(bits > 0, peak, 1.0), 1152921504606846976.0)  # 2^60
    scale = tl.where(bits > 0, scale, 1.0)
    scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
    if tl.program_id(0) == 0:
        tl.store(scales, scale)
        tl.store(scales + 1, 1.0 / scale)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, other=0.0).to(tl.float32) * scale
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(codes + at, value.to(codes.dtype.element_ty), at < n)


def encode(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` in ``dtype``, whose largest value is ``largest``; the factor that brings the largest magnitude of
    ``x`` to that, and its inverse (fp32 scalars). As :func:`ridgeline.nn.quant.codec.quantize`."""
    x = x.contiguous()
    n = x.numel()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(n, BLOCK)
    parts = min(blocks, 4 * processors(x.device))
    peaks = torch.empty(parts, dtype=torch.int32, device=x.device)
    _peaks[(parts,)](x, peaks, n, BLOCK)
    _encode[(blocks,)](x, peaks, codes, scales, n, parts, largest, triton.next_power_of_2(parts), BLOCK, num_warps=8)
    return codes, scales[0], scales[1]
