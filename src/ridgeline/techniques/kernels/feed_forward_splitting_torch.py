"""A feed-forward layer that is computed piece by piece (NLP-Fast, doi:10.1109/PACT52795.2021.00013)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.model.mlp import ACTIVATIONS, MLP, gated


class SplitMLP(MLP):
    """``whole`` with the same parameters, for inference: the inner activations exist one piece at a time.

    Results differ by the order of summation; in 16 bits the pieces' results are summed in fp32.
    """

    def __init__(self, whole: MLP, piece: Callable[[int], tuple[int, int]]) -> None:
        """``piece``: (rows, columns) of a piece for a number of tokens."""
        nn.Module.__init__(self)
        self.activation, self.expand = whole.activation, whole.expand
        self.gate_proj, self.up_proj, self.down_proj = whole.gate_proj, whole.up_proj, whole.down_proj
        self.piece = cache(piece)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., hidden] → [..., hidden]."""
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = self.piece(len(flat))
        inner = self.up_proj.out_features
        if rows >= len(flat) and columns >= inner:
            return super().forward(x)
        out = torch.empty_like(flat)
        bias = self.down_proj.bias
        for few, result in zip(flat.split(rows), out.split(rows), strict=True):
            total = result if columns >= inner or x.dtype.itemsize > 2 else torch.empty_like(few, dtype=torch.float32)
            for first in range(0, inner, columns):
                self._add(few, first, min(inner, first + columns), total)
            if bias is not None:
                total += bias
            if total is not result:
                result.copy_(total)
        return out.view_as(x)

    def _add(self, x: Tensor, first: int, last: int, total: Tensor) -> None:
        """Add to ``total`` (or, of the first columns, put there) what columns ``first`` to ``last`` contribute."""
        weight = self.down_proj.weight[:, first:last].t()
        part = self._columns(x, first, last)
        if total.dtype == part.dtype:
            torch.addmm(total, part, weight, beta=float(first > 0), out=total)
        elif first:
            total += part @ weight
        else:
            total.copy_(part @ weight)

    def _columns(self, x: Tensor, first: int, last: int) -> Tensor:
        """Inner activations ``first`` to ``last`` of ``x`` [rows, hidden]: [rows, last - first]."""

        def product(layer: nn.Linear) -> Tensor:
            return F.linear(x, layer.weight[first:last], None if layer.bias is None else layer.bias[first:last])

        if self.gate_proj is None:
            return ACTIVATIONS[self.activation](product(self.up_proj))
        return gated(self.activation, product(self.gate_proj), product(self.up_proj))
