"""Linear layers whose weight is on the device one tile at a time (arXiv:2104.07857, section 5.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TiledLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] cut into ``count`` tiles of rows, each a separate parameter.

    ``fetch`` and ``drop`` are called with a tile's number before and after its use; before its backward only ``fetch``,
    as the consumer of its gradient drops it.
    """

    def __init__(self, linear: nn.Linear, count: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rows = linear.weight.detach().chunk(count)
        self.tiles = nn.ParameterList([nn.Parameter(r.clone(), linear.weight.requires_grad) for r in rows])
        self.bias = linear.bias
        self.fetch: Callable[[int], None] = lambda i: None
        self.drop: Callable[[int], None] = lambda i: None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        parts: list[Tensor] = []
        for i, tile in enumerate(self.tiles):
            self.fetch(i)
            y = F.linear(x, tile)
            self.drop(i)
            if y.requires_grad:
                y.register_hook(partial(self._before_backward, i))
            parts.append(y)
        out = torch.cat(parts, -1)
        return out if self.bias is None else out + self.bias

    def _before_backward(self, i: int, _: Tensor) -> None:
        self.fetch(i)


def tile_linears(module: nn.Module, count: int) -> list[str]:
    """Replace every linear directly in ``module`` by a tiled one; returns their names."""
    found = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    for name in found:
        setattr(module, name, TiledLinear(getattr(module, name), count))
    return found


def whole_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with tiles joined again: ``x.tiles.0``, ``x.tiles.1``, … become ``x.weight``."""
    out: dict[str, Tensor] = {}
    tiles: dict[str, dict[int, Tensor]] = {}
    for name, value in state.items():
        prefix, found, number = name.rpartition(".tiles.")
        if found:
            tiles.setdefault(prefix, {})[int(number)] = value
        else:
            out[name] = value
    for prefix, parts in tiles.items():
        out[f"{prefix}.weight"] = torch.cat([parts[i] for i in sorted(parts)])
    return out
