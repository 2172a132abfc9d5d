"""What the cases of ``compile_kernels.py`` are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32
NAMES = {F32: "fp32", BF16: "bf16", F16: "fp16"}


class Case(NamedTuple):
    """One call of a host function."""

    label: str
    call: Callable[[], object]
    quick: bool


def e(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of a shape without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")
