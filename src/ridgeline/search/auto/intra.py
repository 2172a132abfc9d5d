"""The best strategy of every operator of a stage: an integer program (Alpa, arXiv:2201.12023, section 4.2).

One of four strategies is chosen for every part of the stage. Two parts in a row that keep the residual stream in
different forms pay for its conversion. The states and activations must fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.spec.sharding import IN_PARTS, Strategy

MIP_GAP = 1e-6
"""Relative optimality gap at which the integer program ends."""


@dataclass(frozen=True)
class Node:
    """A part of the model, or the same part of several layers that share one strategy."""

    choices: tuple[tuple[Strategy, float, float], ...]
    """(strategy, seconds, bytes)."""
    joined: bool = False
    """Whether it must keep the stream in the form of the node before it: the MLP of a layer."""


@dataclass(frozen=True)
class Chosen:
    """The strategies of a stage's nodes."""

    strategies: tuple[Strategy, ...]
    seconds: float


def cost_of(nodes: Sequence[Node], picked: Sequence[int], cut: float, join: float) -> tuple[float, float]:
    """(seconds, bytes) of a choice for every node, with the conversions between them; infinite seconds where a joined
    node needs another form."""
    seconds = size = 0.0
    before: bool | None = None
    for node, at in zip(nodes, picked, strict=True):
        strategy, each, held = node.choices[at]
        parts = strategy in IN_PARTS
        if before is not None and before != parts:
            seconds += float("inf") if node.joined else cut if parts else join
        seconds, size, before = seconds + each, size + held, parts
    return seconds, size


def best_strategies(nodes: Sequence[Node], cut: float, join: float, room: float) -> Chosen | None:
    """The choice with the least seconds that fits into ``room`` bytes; None: none fits.

    ``cut`` and ``join``: seconds of a conversion to parts, and from them.
    """
    free = [min(range(len(n.choices)), key=lambda i, n=n: n.choices[i][1]) for n in nodes]  # type: ignore[misc]
    forms = {n.choices[at][0] in IN_PARTS for n, at in zip(nodes, free, strict=True)}
    seconds, size = cost_of(nodes, free, cut, join)
    if len(forms) == 1 and size <= room:  # each at its best, without a conversion
        return Chosen(tuple(n.choices[at][0] for n, at in zip(nodes, free, strict=True)), seconds)
    picked = _program(nodes, cut, join, room)
    if picked is None:
        return None
    return Chosen(
        tuple(n.choices[at][0] for n, at in zip(nodes, picked, strict=True)), cost_of(nodes, picked, cut, join)[0]
    )


def _program(nodes: Sequence[Node], cut: float, join: float, room: float) -> list[int] | None:
    """One binary variable for every choice; for every pair of neighbors two that are 1 where the stream is cut or
    joined between them: at least the difference of the two forms, which are sums of the binary ones."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    first = np.cumsum([0, *(len(n.choices) for n in nodes)])
    count, pairs = int(first[-1]), len(nodes) - 1
    unit = max(max(abs(s) for _, s, _ in n.choices) for n in nodes) or 1.0
    costs = np.array([s / unit for n in nodes for _, s, _ in n.choices] + [cut / unit, join / unit] * pairs)
    sizes = np.array([b / max(room, 1.0) for n in nodes for _, _, b in n.choices] + [0.0] * (2 * pairs))
    parts = [[first[i] + k for k, c in enumerate(n.choices) if c[0] in IN_PARTS] for i, n in enumerate(nodes)]
    rows, low, high = [], [], []

    def add(row: np.ndarray, least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for i in range(len(nodes)):
        row = np.zeros(len(costs))
        row[first[i] : first[i + 1]] = 1.0
        add(row, 1.0, 1.0)
    for i in range(pairs):
        row = np.zeros(len(costs))
        row[parts[i + 1]] += 1.0
        row[parts[i]] -= 1.0
        if nodes[i + 1].joined:
            add(row, 0.0, 0.0)
            continue
        for sign, at in ((1.0, count + 2 * i), (-1.0, count + 2 * i + 1)):
            change = sign * row
            change[at] = -1.0
            add(change, -np.inf, 0.0)
    add(sizes, -np.inf, 1.0)
    whole = np.array([1] * count + [0] * (2 * pairs))
    found = milp(costs, integrality=whole, bounds=Bounds(0, 1), options={"mip_rel_gap": MIP_GAP},
                 constraints=LinearConstraint(np.array(rows), low, high))  # fmt: skip
    if found.x is None:
        return None
    return [int(np.argmax(found.x[first[i] : first[i + 1]])) for i in range(len(nodes))]
