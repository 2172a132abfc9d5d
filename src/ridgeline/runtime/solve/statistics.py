"""Statistics of calibration inputs: second moments and peaks, accumulated chunk by chunk in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4
"""Row blocks of a symmetric product, of each of which what lies right of the diagonal's block is not computed: 5/8 of
the arithmetic. PyTorch has no BLAS ``syrk``."""
NARROW = 128
"""Columns of a block at least: narrower products take as long as the whole."""


class Gram:
    """H = (2/n) Xᵀ X over all rows seen, [width, width] fp32, as a running mean."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.lower = torch.zeros(width, width, dtype=torch.float32, device=device)
        """Valid in blocks up to the diagonal."""
        self.step = max(-(-width // PARTS), NARROW)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Accumulate rows [..., width]."""
        x = x.reshape(-1, x.shape[-1]).float()
        n = len(x)
        if not n:
            return
        self.rows += n
        for start in range(0, len(self.lower), self.step):
            end = start + self.step
            block, part = self.lower[start:end, :end], x[:, start:end]
            block.addmm_(part.t(), x[:, :end], beta=(self.rows - n) / self.rows, alpha=2 / self.rows)

    @property
    def value(self) -> Tensor:
        """H [width, width] of the rows so far; it changes as others are added."""
        for start in range(0, len(self.lower), self.step):
            end = start + self.step
            block = self.lower[start:end, start:end]
            block.copy_(block.tril() + block.tril(-1).t())
            self.lower[start:end, end:] = self.lower[end:, start:end].t()
        return self.lower


class InputPeak:
    """max |x| of each input, [width] fp32."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(width, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        """Accumulate rows [..., width]."""
        if x.numel():
            torch.maximum(self.value, x.reshape(-1, x.shape[-1]).float().abs().amax(0), out=self.value)
