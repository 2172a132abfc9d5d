"""The column sweep of Optimal Brain Surgeon, shared by GPTQ, SparseGPT, their combination, and ternary experts.

Columns are fixed one after another: snapped to a grid, or dropped from the mask, and the resulting error is compensated
as far as possible in the columns that are still free (arXiv:2210.17323, algorithm 1; arXiv:2301.00774, algorithm 1).
The one inverse that is needed, of H over the columns still free, is read from the rows of one Cholesky factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.runtime.solve.grid import Fitted
from ridgeline.runtime.solve.support import Given, Support, reordered

BLOCK = 128
"""Number of columns after which the rest of the weight is updated, by one matrix product."""
INNER = 16
"""Number of columns after which the rest of the block is updated: before that an update touches only these."""


@dataclass(frozen=True)
class Solved:
    """Result of a solver."""

    weight: Tensor
    """[out, in]: on the grid, within the mask."""
    keep: Tensor | None
    """bool [out, in], the mask; None: dense."""
    damp: float
    """The damping that was needed, as a fraction of H's mean diagonal; inf: H was not usable, the result is plain
    rounding."""

    @property
    def notes(self) -> dict[str, Any]:
        """The damping for a report (JSON has no infinity), and whether no error compensation was possible."""
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

    Damping increases tenfold, up to twice, where the factorization fails; after that it is inf and U the identity.
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

    ``act_order`` visits columns by decreasing diagonal of H; grids keep the parameters of their own columns ("static
    groups"), so the result does not depend on the order's layout. Not for n:m masks, whose groups are adjacent columns.
    Inputs that are never active (zero on the diagonal) get weight 0.
    """
    return sweep_stack(weight.unsqueeze(0), [gram], grid, support, act_order, damp, block)[0]


def sweep_stack(
    weight: Tensor,
    grams: Sequence[Tensor],
    grid: Fitted | None = None,
    support: Support | None = None,
    act_order: bool = False,
    damp: float = 0.01,
    block: int = BLOCK,
) -> list[Solved]:
    """:func:`sweep` for several problems of one shape, batched: ``weight`` [problems, out, in] and each one's H.

    ``grid`` and ``support`` cover all rows, [problems · out, in]. Every problem has its own order, damping and
    fallback. With more than one problem, the mask must be given in advance, and with ``act_order`` a grid's values must
    be the same for whole rows. In addition to its arguments it holds one [in, in] and three [out, in] for each problem.
    """
    count, out, width = weight.shape
    assert count == 1 or support is None or isinstance(support, Given)
    w = torch.empty(width, count, out, dtype=weight.dtype, device=weight.device)  # a column of W is contiguous
    w.copy_(weight.permute(2, 0, 1))
    upper = torch.empty(count, width, width, dtype=w.dtype, device=w.device)
    orders, used = [], []
    for e, gram in enumerate(grams):
        gram = gram.clone()
        dead = gram.diagonal() == 0
        gram.diagonal()[dead] = 1
        w[dead, e] = 0
        if act_order:
            orders.append(torch.argsort(gram.diagonal(), descending=True, stable=True))
            gram = gram[orders[e]][:, orders[e]]
        upper[e], damping = inverse_factor(gram, damp)
        used.append(damping)
    columns = list(range(width))
    if act_order:
        assert support is None or support.span == 0
        assert count == 1 or grid is None or grid.whole_rows
        w, columns = reordered(w, orders), orders[0].tolist()
        if isinstance(support, Given):
            support = support.permuted(orders)
    kept = _fix_columns(w, upper, grid, columns, support, block)
    kept = None if kept is None else kept.view_as(w)
    if act_order:
        back = [torch.argsort(order) for order in orders]
        w, kept = reordered(w, back), None if kept is None else reordered(kept, back)
    found = w.permute(1, 2, 0).contiguous()
    keeps = [None] * count if kept is None else list(kept.permute(1, 2, 0).contiguous())
    return [Solved(q, keep, damping) for q, keep, damping in zip(found, keeps, used, strict=True)]


def _fix_columns(
    w: Tensor, upper: Tensor, grid: Fitted | None, columns: list[int], support: Support | None, block: int
) -> Tensor | None:
    """Put ``w`` [in, problems, out] on the grid, in place, using the factors U [problems, in, in] of each; returns the
    mask.

    ``upper`` is divided by its diagonal in place, so that the compensated error is the plain difference.
    """
    width = len(w)
    flat = w.view(width, -1)
    diagonal = upper.diagonal(dim1=1, dim2=2).t().unsqueeze(-1).clone()  # [in, problems, 1]
    upper.div_(diagonal.transpose(0, 1))
    across = upper.permute(1, 2, 0).unsqueeze(-1)  # [in, in, problems, 1]
    by_problem = w.transpose(0, 1)
    errors = torch.empty(block, *w.shape[1:], dtype=w.dtype, device=w.device)
    q = torch.empty_like(flat[0])
    kept = None if support is None else torch.empty_like(flat, dtype=torch.bool)
    span = support.span if support is not None else 0
    inner = INNER if span == 0 else span * max(1, INNER // span)  # whole groups

    def make_up(source: slice, target: slice, error: Tensor) -> None:
        by_problem[:, target].baddbmm_(upper[:, source, target].mT, error.transpose(0, 1), alpha=-1)

    def keep(part: slice) -> Tensor:
        assert support is not None
        return support.keep((w[part] / diagonal[part]).square_().view_as(flat[part]), part)

    for a in range(0, width, block):
        b = min(a + block, width)
        if kept is not None and span == 0:
            kept[a:b] = keep(slice(a, b))
        start = a
        for j in range(a, b):
            if j == start + inner:  # the error that the last few columns leave to the rest of the block, in one product
                make_up(slice(start, j), slice(j, b), errors[start - a : j - a])
                start = j
            if kept is not None and span and j % span == 0:
                kept[j : j + span] = keep(slice(j, j + span))
            column = flat[j]
            if grid is None:
                q.copy_(column)
            else:
                grid.snap(column, columns[j], q)
            if kept is not None:
                q.mul_(kept[j])
            error = errors[j - a]
            torch.sub(column, q, out=error.view(-1))
            column.copy_(q)
            end = min(start + inner, b)
            if j + 1 < end:
                w[j + 1 : end].addcmul_(across[j, j + 1 : end], error, value=-1)
        if b < width:
            make_up(slice(a, b), slice(b, width), errors[: b - a])
    return kept
