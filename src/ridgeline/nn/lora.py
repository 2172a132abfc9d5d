"""Low-rank adapters around frozen linear layers (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.nn.collectives import linear, local
from ridgeline.nn.quantised import QuantisedLinear


class LoRALinear(nn.Module):
    """y = base(x) + (alpha / rank) · (x Aᵀ) Bᵀ with A [rank, in] random and B [out, rank] zero at the start."""

    def __init__(self, base: nn.Linear | QuantisedLinear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        device = next(iter([*base.parameters(), *base.buffers()])).device
        dtype = base.dtype if isinstance(base, QuantisedLinear) else base.weight.dtype
        a = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(a.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]."""
        update = F.linear(linear(x, local(self.lora_a)), local(self.lora_b))
        return torch.add(self.base(x), update, alpha=self.scale)


def merged(state: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """A model's state with the updates, times ``scale`` = alpha / rank, added to the weights under them."""
    out: dict[str, torch.Tensor] = {}
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


def wrap_linears(model: nn.Module, targets: tuple[str, ...], rank: int, alpha: float, seed: int = 0) -> list[str]:
    """Wrap every linear whose last name is in ``targets``; returns the wrapped names."""
    generator = torch.Generator().manual_seed(seed)
    wrapped: list[str] = []
    for name, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            if leaf in targets and hasattr(child, "in_features"):
                setattr(module, leaf, LoRALinear(child, rank, alpha, generator))
                wrapped.append(f"{name}.{leaf}" if name else leaf)
    return wrapped
