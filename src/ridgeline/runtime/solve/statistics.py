"""Statistics of calibration inputs: second moments and peaks, accumulated chunk by chunk in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


class Gram:
    """H = (2/n) Xᵀ X over all rows seen, [width, width] fp32, as a running mean."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(width, width, dtype=torch.float32, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Accumulate rows [..., width]."""
        x = x.reshape(-1, x.shape[-1]).float()
        n = len(x)
        if n:
            self.rows += n
            self.value.addmm_(x.t(), x, beta=(self.rows - n) / self.rows, alpha=2 / self.rows)


class InputPeak:
    """max |x| of each input, [width] fp32."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(width, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        """Accumulate rows [..., width]."""
        if x.numel():
            torch.maximum(self.value, x.reshape(-1, x.shape[-1]).float().abs().amax(0), out=self.value)
