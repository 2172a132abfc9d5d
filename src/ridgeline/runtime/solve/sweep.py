"""The column sweep of Optimal Brain Surgeon: GPTQ, SparseGPT, both jointly, and ternary experts are this one function.

Columns are fixed one after the other: snapped to a grid, or dropped from the support, and what that costs is undone as
far as possible in the columns that are still free (arXiv:2210.17323, algorithm 1; arXiv:2301.00774, algorithm 1). The
one inverse that is needed, of H over the columns still free, is read off the rows of one Cholesky factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.runtime.solve.grid import Fitted
from ridgeline.runtime.solve.support import Given, Support

BLOCK = 128
"""Columns after which the rest of the weight is updated, by one matrix product."""
INNER = 16
"""Columns after which the rest of the block is: until then an update touches only these."""


@dataclass(frozen=True)
class Solved:
    """What a solver found."""

    weight: Tensor
    """[out, in]: on the grid, within the support."""
    keep: Tensor | None
    """bool [out, in], the support; None: dense."""
    damp: float
    """The damping that was needed, as a share of H's mean diagonal; inf: H was not usable, the result is plain
    rounding."""

    @property
    def said(self) -> dict[str, Any]:
        """The damping for a report (JSON has no infinity), and whether nothing could be made up for."""
        if math.isfinite(self.damp):
            return {"damp": self.damp}
        return {"damp": None, "fallback": "H cannot be factored, even damped: no column made up for another"}


def relative_error(weight: Tensor, found: Tensor, gram: Tensor) -> float:
    """tr((W - Q) H (W - Q)ᵀ) / tr(W H Wᵀ)."""
    difference = weight - found
    base = torch.sum((weight @ gram) * weight).item()
    return torch.sum((difference @ gram) * difference).item() / base if base > 0 else 0.0


def inverse_factor(gram: Tensor, damp: float) -> tuple[Tensor, float]:
    """(U, damping used): U upper triangular with Uᵀ U = (H + λI)⁻¹, λ = damp · mean diagonal.

    Damping rises tenfold, twice, where the factorisation fails; after that it is inf and U the identity.
    """
    mean = gram.diagonal().mean()
    for factor in (1, 10, 100):
        damped = gram.clone()
        damped.diagonal().add_(mean * damp * factor)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed or not bool(torch.isfinite(lower.diagonal()).all()):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return upper, damp * factor
    return torch.eye(len(gram), dtype=gram.dtype, device=gram.device), float("inf")


def sweep(
    weight: Tensor,
    gram: Tensor,
    grid: Fitted | None = None,
    support: Support | None = None,
    act_order: bool = False,
    damp: float = 0.01,
    block: int = BLOCK,
) -> Solved:
    """Snap ``weight`` [out, in] (fp32) to ``grid`` within ``support`` under H = ``gram`` [in, in].

    ``act_order`` visits columns by falling diagonal of H; grids keep the parameters of their own columns ("static
    groups"), so nothing of the order remains in the result. Not for n:m supports, whose groups are neighbours. Inputs
    that are never active (zero on the diagonal) get weight 0.
    """
    out, width = weight.shape
    w = weight.t().clone(memory_format=torch.contiguous_format)  # [in, out]: a column of W is contiguous
    gram = gram.clone()
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1
    w[dead] = 0
    order = None
    if act_order:
        assert support is None or support.span == 0
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
        w, gram = w[order], gram[order][:, order]
        if isinstance(support, Given):
            support = support.permuted(order)
    upper, used = inverse_factor(gram, damp)
    columns = list(range(width)) if order is None else order.tolist()
    diagonal = upper.diagonal()
    kept = None if support is None else torch.empty_like(w, dtype=torch.bool)
    span = support.span if support is not None else 0
    inner = INNER if span == 0 else span * max(1, INNER // span)  # whole groups
    errors = torch.empty(block, out, dtype=w.dtype, device=w.device)
    q = torch.empty(out, dtype=w.dtype, device=w.device)
    for a in range(0, width, block):
        b = min(a + block, width)
        if support is not None and kept is not None and support.span == 0:
            kept[a:b] = support.keep((w[a:b] / diagonal[a:b, None]).square_(), slice(a, b))
        scale = diagonal[a:b].tolist()
        start = a
        for j in range(a, b):
            if j == start + inner:  # what the last few columns left to the rest of the block, in one product
                w[j:b].addmm_(upper[start:j, j:b].t(), errors[start - a : j - a], alpha=-1)
                start = j
            if support is not None and kept is not None and support.span and j % support.span == 0:
                group = slice(j, j + support.span)
                kept[group] = support.keep((w[group] / diagonal[group, None]).square_(), group)
            column = w[j]
            if grid is None:
                q.copy_(column)
            else:
                grid.snap(column, columns[j], q)
            if kept is not None:
                q.mul_(kept[j])
            error = errors[j - a]
            torch.sub(column, q, out=error).div_(scale[j - a])
            column.copy_(q)
            end = min(start + inner, b)
            if j + 1 < end:
                w[j + 1 : end].addmm_(upper[j, j + 1 : end, None], error[None], alpha=-1)
        if b < width:
            w[b:].addmm_(upper[a:b, b:].t(), errors[: b - a], alpha=-1)
    if order is not None:
        back = torch.argsort(order)
        w = w[back]
        kept = None if kept is None else kept[back]
    return Solved(w.t().contiguous(), None if kept is None else kept.t().contiguous(), used)
