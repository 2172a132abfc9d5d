"""Bottleneck adapters after a sub-layer (Houlsby et al. 2019, arXiv:1902.00751)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.adapters.adapter import Adapter, beside
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.errors import UserError


class BottleneckLinear(Adapter):
    """h + gelu(h D + d) U + u for the output h = base(x) of a sub-layer's last linear.

    D [size, width] starts small and random; U [width, size], d and u start at zero, so that the adapter starts as the
    identity.
    """

    leaves: ClassVar[tuple[str, ...]] = ("adapter_down", "adapter_down_bias", "adapter_up", "adapter_up_bias")

    def __init__(self, base: Any, size: int, generator: torch.Generator | None = None) -> None:
        super().__init__(base)
        width, (device, dtype) = base.out_features, beside(base)
        down = torch.empty(size, width).normal_(std=width**-0.5, generator=generator)
        self.adapter_down = nn.Parameter(down.to(device, dtype))
        self.adapter_down_bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        self.adapter_up = nn.Parameter(torch.zeros(width, size, dtype=dtype, device=device))
        self.adapter_up_bias = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The sub-layer's output with the adapter applied."""
        inner = F.gelu(F.linear(y, local(self.adapter_down), local(self.adapter_down_bias)))
        return y + F.linear(inner, local(self.adapter_up), local(self.adapter_up_bias))

    def weight(self) -> Tensor:
        """Always raises: the adapter is not linear, so no weight represents it."""
        raise UserError("a bottleneck adapter is not linear, so that no weight of the base can hold it",
                        "keep it as an adapter (adapter_config.json beside its tensors)")  # fmt: skip
