"""Grouped products of MoE experts with low-bit weights in Triton, for CUDA devices: one launch for all experts, without
a host wait for their row counts. Imported only where Triton is installed.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ridgeline.nn.kernels.lowbit_matmul import BYTE_STRIPE, launch_tiles
from ridgeline.nn.kernels.quick import power


def starts_of(expert: Tensor, experts: int) -> Tensor:
    """Where each expert's rows begin, int32 [a power of two + 1], of sorted ``expert`` [M]; behind the last one: M."""
    each = torch.arange(power(experts) + 1, device=expert.device, dtype=expert.dtype)
    return torch.searchsorted(expert, each, out_int32=True)


def grouped_product(x: Tensor, starts: Tensor, experts: int, words: Tensor, scale: Tensor, zero: Tensor | None,
                    bits: int, center: int, group: int, stripe: int, arrived: Tensor,
                    bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """``x`` [M, in] (bf16 or fp16) sorted by expert, each row times its expert's weight, plus its bias → [M, out].

    ``starts``: see :func:`starts_of`. The experts' words are one after the other, int32 [experts · out, …], and so are
    the columns of ``scale`` and ``zero`` [groups, experts · out] and ``bias`` [experts · out]; the rest as of
    :func:`~ridgeline.nn.kernels.lowbit_matmul.lowbit_product`.
    """
    if zero is not None and zero.stride(0) != scale.stride(0):
        scale, zero = scale.contiguous(), zero.contiguous()
    return launch_tiles(x.contiguous(), words, scale, zero, bits, center, group, stripe, arrived, bias, x.dtype, starts,
                        experts)  # fmt: skip


def grouped_float8_product(x: Tensor, starts: Tensor, experts: int, codes: Tensor, scales: Tensor, arrived: Tensor,
                           bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """The same of weights in e4m3 ``codes`` [experts · out, in] with fp32 ``scales`` [experts · out, 1]: see
    :func:`~ridgeline.nn.kernels.lowbit_matmul.float8_product`."""
    k = codes.shape[1]
    return grouped_product(x, starts, experts, codes.view(torch.uint8), scales.view(1, -1), None, 8, 0, k,
                           gcd(k, BYTE_STRIPE), arrived, bias)  # fmt: skip
