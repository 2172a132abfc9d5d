"""QuantEase: cyclic coordinate descent on the layer error, with optional outliers (arXiv:2309.01885).

With S = H, column j of W has the minimizer Q_j + [(W - Q) S]_j / S_jj when all others are fixed; the grid value nearest
to it is the best one. So a pass that starts on the grid can never increase the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.nn.quant.packed import PackedOutliers
from ridgeline.runtime.solve.grid import Fitted, Grid
from ridgeline.runtime.solve.sweep import BLOCK

RELAXED_UNTIL = 25
"""Passes in which every third may leave the grid, when starting from the weights (the paper's section 3.3)."""


@dataclass(frozen=True)
class Descended:
    """Result of the descent."""

    on_grid: Tensor
    """[out, in], without the outliers."""
    weight: Tensor
    """[out, in]: on the grid, plus the outliers."""
    fitted: Fitted
    outliers: PackedOutliers | None
    errors: tuple[float, ...]
    """tr((W - Q) H (W - Q)ᵀ) at the start (if there was one) and after every pass that stayed on the grid."""


def descend(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    start: Tensor | None = None,
    keep: Tensor | None = None,
    passes: int = 8,
    outliers: float = 0.0,
    structured: bool = False,
    block: int = BLOCK,
) -> Descended:
    """Coordinate descent from ``start`` [out, in] (on the grid of ``weight`` without its :func:`largest` entries, such
    as GPTQ's solution), or from ``weight`` itself (cold start).

    ``keep`` bool [out, in]: entries outside it stay zero. ``outliers``: fraction of the entries (``structured``: of the
    inputs, whole columns) that are kept in 16 bits, found by iterative hard thresholding (the paper's algorithm 3); the
    grid is fitted to the rest, whose range is smaller. Cold starts relax every third pass, and end on the grid.
    """
    width = weight.shape[1]
    gram = gram.clone()
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1
    w = weight.t().clone(memory_format=torch.contiguous_format)
    w[dead] = 0
    mask = None if keep is None else keep.t().contiguous()
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    back, columns = torch.argsort(order), order.tolist()
    w, s = w[order], gram[order][:, order]
    mask = None if mask is None else mask[order]

    count = round(outliers * (width if structured else w.numel()))
    stored = grid_dtype(grid) or torch.float16
    sparse = largest(w, count, structured) if count else torch.zeros_like(w)
    fitted = grid.fit((w - sparse)[back].t().contiguous())
    q = (w - sparse).clone() if start is None else start.t()[order].contiguous()
    if mask is not None:
        q.mul_(mask)
    step = 1 / (2 * _largest_eigenvalue(s)) if count else 0.0
    errors = [] if start is None else [_error(w - sparse - q, s)]
    for it in range(passes):
        last = it == passes - 1
        if count and last:
            sparse = sparse.to(stored).to(sparse.dtype)  # in the stored dtype, so that the last pass corrects for it
        relax = start is None and it % 3 == 1 and it <= RELAXED_UNTIL and not last
        _sweep(q, s, s @ (w - sparse - q), None if relax else (fitted, columns), mask, block)
        if not relax:
            errors.append(_error(w - sparse - q, s))
        if count and not last:
            gradient = s @ (q + sparse - w)
            moved = sparse - 2 * step * gradient
            sparse = largest(moved if mask is None else moved * mask, count, structured)
    record = _packed(sparse[back].t().contiguous(), stored) if count else None
    on_grid = q[back].t().contiguous()
    found = on_grid + sparse[back].t() if count else on_grid
    return Descended(on_grid, found, fitted, record, tuple(errors))


def _sweep(
    q: Tensor,
    s: Tensor,
    r: Tensor,
    snap: tuple[Fitted, list[int]] | None,
    mask: Tensor | None,
    block: int,
) -> None:
    """One pass over the inputs of ``q`` [in, out], in place; ``r`` = s · (target - q) is used up.

    ``snap``: the grid and the column in it of each input; none: the entries stay between the values of the grid.
    """
    width, diagonal, u = len(q), s.diagonal().tolist(), torch.empty_like(q[0])
    for a in range(0, width, block):
        b = min(a + block, width)
        delta = torch.zeros(b - a, q.shape[1], dtype=q.dtype, device=q.device)
        for j in range(a, b):
            column, change = q[j], delta[j - a]
            torch.add(column, r[j], alpha=1 / diagonal[j], out=u)
            if j > a:
                u.addmv_(delta[: j - a].t(), s[a:j, j], alpha=-1 / diagonal[j])
            if snap is not None:
                snap[0].snap(u, snap[1][j], u)
            if mask is not None:
                u.mul_(mask[j])
            torch.sub(u, column, out=change)
            column.copy_(u)
        if b < width:
            r[b:].addmm_(s[b:, a:b], delta, alpha=-1)


def _packed(outliers: Tensor, dtype: torch.dtype) -> PackedOutliers:
    flat = outliers.view(-1)
    index = flat.nonzero().squeeze(1)
    return PackedOutliers(index.to(torch.int32), flat[index].to(dtype))


def grid_dtype(grid: Grid) -> torch.dtype | None:
    """The dtype in which a grid's scales are stored, if specified."""
    return getattr(grid, "scale_dtype", None)


def largest(x: Tensor, count: int, structured: bool) -> Tensor:
    """``x`` [in, out] (Wᵀ) with all but its ``count`` largest entries (or inputs) set to zero."""
    out = torch.zeros_like(x)
    if structured:
        rows = x.norm(dim=1).topk(count).indices
        out[rows] = x[rows]
    else:
        flat = x.reshape(-1)
        index = flat.abs().topk(count, sorted=False).indices
        out = out.reshape(-1).index_copy_(0, index, flat[index]).view(x.shape)
    return out


def _largest_eigenvalue(s: Tensor, rounds: int = 40) -> float:
    """Largest eigenvalue of a positive semi-definite matrix, by power iteration, increased by two percent to be an
    upper bound."""
    v = s.sum(0)
    for _ in range(rounds):
        v = s @ (v / v.norm().clamp_min(1e-30))
    return 1.02 * float(v.norm())


def _error(difference: Tensor, s: Tensor) -> float:
    return float(torch.sum((s @ difference) * difference))
