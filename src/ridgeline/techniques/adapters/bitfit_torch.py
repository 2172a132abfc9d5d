"""BitFit: biases alone (Ben-Zaken et al. 2022, arXiv:2106.10199)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ridgeline.nn.adapters.adapter import Adapter, dense
from ridgeline.nn.parallel.collectives import local


class BitFitLinear(Adapter):
    """y = base(x) + b, with b [out] zero at the start: what is added to the base's bias, if it has one."""

    leaves: ClassVar[tuple[str, ...]] = ("adapter_bias",)

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        like = next(base.parameters())
        dtype = like.dtype if like.is_floating_point() else base.dtype
        self.adapter_bias = nn.Parameter(torch.zeros(base.out_features, dtype=dtype, device=like.device))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output with the bias added."""
        return y + local(self.adapter_bias).to(y.dtype)

    def weight(self) -> Tensor:
        """The base's."""
        return dense(self.base)

    def bias(self) -> Tensor:
        """The base's and the task's together."""
        own, mine = self.base.bias, local(self.adapter_bias)
        return mine if own is None else local(own) + mine
