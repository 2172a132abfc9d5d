"""Low-rank adapters around frozen linear layers (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.adapters.base import Adapter, dense
from ridgeline.nn.adapters.dropout import Dropout
from ridgeline.nn.collectives import linear, local
from ridgeline.nn.quantised import QuantisedLinear


class LoRALinear(Adapter):
    """y = base(x) + scale · (x Aᵀ) Bᵀ with A [rank, in] random and B [out, rank] zero at the start."""

    leaves: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")

    def __init__(
        self,
        base: Any,
        rank: int,
        scale: float,
        generator: torch.Generator | None = None,
        dropout: Dropout | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__(base)
        self.scale, self.dropout, self.layer = scale, dropout, layer
        device = next(iter([*base.parameters(), *base.buffers()])).device
        dtype = base.dtype if isinstance(base, QuantisedLinear) else base.weight.dtype
        a = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(a.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))

    def _update(self, x: Tensor) -> Tensor:
        if self.dropout is not None and self.dropout.on:
            mid = self.dropout.linear(x, self.lora_a, self.layer)
        else:
            mid = linear(x, local(self.lora_a))
        return F.linear(mid, local(self.lora_b))

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output with the update added."""
        return torch.add(y, self._update(x), alpha=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]. The update first: where a layer is recomputed the base's product is last, and left
        out."""
        if self.merged:
            return super().forward(x)
        update = self._update(x)
        return torch.add(self.base(x), update, alpha=self.scale)

    def weight(self) -> Tensor:
        """W + scale · B A."""
        return dense(self.base) + self.scale * (local(self.lora_b) @ local(self.lora_a))


def merged(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A model's state with the updates, times ``scale``, added to the weights under them."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in ("lora_a", "lora_b"):
            continue
        adapted = prefix.removesuffix(".base")
        if f"{adapted}.lora_a" in state:
            name = f"{adapted}.{leaf}"
            if leaf == "weight":
                value = value + scale * (state[f"{adapted}.lora_b"] @ state[f"{adapted}.lora_a"])
        out[name] = value
    return out
