"""BitFit: train biases only (Ben-Zaken et al. 2022, arXiv:2106.10199)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ridgeline.nn.adapters.adapter import Adapter, beside, dense
from ridgeline.nn.parallel.collectives import local


class BitFitLinear(Adapter):
    """y = base(x) + b, where b [out] starts at zero and is added to the base's bias, if there is one."""

    leaves: ClassVar[tuple[str, ...]] = ("adapter_bias",)

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        device, dtype = beside(base)
        self.adapter_bias = nn.Parameter(torch.zeros(base.out_features, dtype=dtype, device=device))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output with the bias added."""
        return y + local(self.adapter_bias).to(y.dtype)

    def weight(self) -> Tensor:
        """The base's weight."""
        return dense(self.base)

    def bias(self) -> Tensor:
        """The sum of the base's bias and the trained one."""
        own, mine = self.base.bias, local(self.adapter_bias)
        return mine if own is None else local(own) + mine
