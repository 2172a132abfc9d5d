"""The error table: errors of predictions against measurements, beside those of a trivial baseline."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from ridgeline.predict.serving.simulate import percentile
from ridgeline.validate.case import Case


@dataclass(slots=True)
class Score:
    """One line of the error table. Errors and shares as fractions: 0.1 is 10 %."""

    file: str
    group: str
    quantity: str
    n: int
    median_ape: float
    """Median absolute relative error."""
    mean_ape: float
    p90_ape: float
    bias: float
    """Mean signed relative error; above zero the prediction is too high."""
    within_10: float
    """Share of rows with an error of at most 10 %."""
    within_20: float
    baseline_mean_ape: float
    """Mean error of the trivial baseline, its constants fitted to these very rows."""
    baseline: str
    """Name of the baseline."""
    inside: float | None
    """Share of rows inside the 95 % interval that their prediction states; None where it states none."""
    source: str
    """Where the constants behind the predictions come from."""
    rank_correlation: float | None
    """Spearman's coefficient of predicted and measured; None for fewer than three rows."""


@dataclass(slots=True)
class PlanChoice:
    """Rows that differ only in their plan: the cost of following the predictor's choice."""

    file: str
    quantity: str
    size: int
    best: str
    picked: str
    regret: float
    """Loss against the best measured plan: 0.03 is 3 % slower (or 3 % less throughput)."""


def score(file: str, cases: list[Case]) -> list[Score]:
    """One score per (group, quantity), in order of appearance."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.group, case.quantity].append(case)
    return [_score(file, group, quantity, rows) for (group, quantity), rows in groups.items()]


def _score(file: str, group: str, quantity: str, rows: list[Case]) -> Score:
    errors = [c.error for c in rows]
    sizes = sorted(map(abs, errors))
    trivial, what = baseline(rows)
    return Score(
        file=file,
        group=group,
        quantity=quantity,
        n=len(rows),
        median_ape=statistics.median(sizes),
        mean_ape=statistics.fmean(sizes),
        p90_ape=percentile(sizes, 0.9),
        bias=statistics.fmean(errors),
        within_10=sum(x <= 0.1 for x in sizes) / len(sizes),
        within_20=sum(x <= 0.2 for x in sizes) / len(sizes),
        baseline_mean_ape=trivial,
        baseline=what,
        inside=_inside(rows),
        source=", ".join(dict.fromkeys(c.source for c in rows if c.source)),
        rank_correlation=spearman([c.predicted for c in rows], [c.measured for c in rows]),
    )


def _inside(rows: list[Case]) -> float | None:
    stated = [(abs(math.log(c.predicted / c.measured)), 1.96 * c.spread) for c in rows if c.spread is not None]
    return sum(error <= reach for error, reach in stated) / len(stated) if stated else None


def baseline(rows: list[Case]) -> tuple[float, str]:
    """(mean absolute relative error, name) of a non-negative combination of the cases' terms.

    The constants minimize the mean squared relative error on the same rows: the best such a formula can do.
    """
    import numpy as np
    from scipy.optimize import nnls

    width = min(len(c.terms) for c in rows)
    target = np.array([1 / c.measured if c.inverse else c.measured for c in rows])
    terms = np.array([c.terms[:width] for c in rows], dtype=float)
    scaled = terms / target[:, None]
    usable = np.isfinite(scaled).all(axis=1)
    try:
        weights, _ = nnls(scaled[usable], np.ones(int(usable.sum())))
    except RuntimeError:  # no convergence
        weights = np.zeros(width)
    guess = terms @ weights
    measured = np.array([c.measured for c in rows])
    estimate = 1 / np.maximum(guess, 1e-300) if rows[0].inverse else guess
    name = "one constant" if width == 1 else f"{width}-constant roofline"
    return float(np.mean(np.abs(estimate / measured - 1)[usable])) if usable.any() else 1.0, name


def spearman(a: list[float], b: list[float]) -> float | None:
    """Rank correlation with ties averaged; None for fewer than three values or without variation."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    mx, my = statistics.fmean(x), statistics.fmean(y)
    sx = math.sqrt(sum((v - mx) ** 2 for v in x))
    sy = math.sqrt(sum((v - my) ** 2 for v in y))
    if not sx or not sy:
        return None
    return sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / (sx * sy)


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for at in order[i : j + 1]:
            ranks[at] = (i + j) / 2
        i = j + 1
    return ranks


def choices(file: str, cases: Iterable[Case]) -> list[PlanChoice]:
    """The regret of every set of alternatives with at least two different plans.

    Repeated measurements of one plan (equal predictions) count once, by their median.
    """
    sets: dict[tuple[str, Hashable], list[Case]] = defaultdict(list)
    for c in cases:
        if c.alternatives is not None:
            sets[c.quantity, c.alternatives].append(c)
    out = []
    for (quantity, _), alternatives in sets.items():
        plans: dict[float, list[Case]] = defaultdict(list)
        for c in alternatives:
            plans[c.predicted].append(c)
        if len(plans) < 2:
            continue
        higher = alternatives[0].better == "higher"
        real = {p: statistics.median(c.measured for c in same) for p, same in plans.items()}
        pick = max(real) if higher else min(real)
        best = max(real, key=real.__getitem__) if higher else min(real, key=real.__getitem__)
        regret = real[best] / real[pick] - 1 if higher else real[pick] / real[best] - 1
        out.append(PlanChoice(file, quantity, len(plans), plans[best][0].label, plans[pick][0].label, regret))
    return out


def regret_summary(found: list[PlanChoice]) -> dict[str, Any] | None:
    """Median, mean and worst regret, and how often the best was picked; None without any choice."""
    if not found:
        return None
    sizes = sorted(c.regret for c in found)
    return {
        "n": len(sizes),
        "median": statistics.median(sizes),
        "mean": statistics.fmean(sizes),
        "p90": percentile(sizes, 0.9),
        "max": sizes[-1],
        "best_picked": sum(x == 0 for x in sizes) / len(sizes),
    }
