"""Trees of drafted tokens, which one pass verifies (SpecInfer, arXiv:2305.09781; EAGLE-2, arXiv:2406.16858).

A node's token is a guess at what follows its parent's. Nodes are rows of one packed pass: each is stored at a place of
its own behind the known tokens, in the order of the nodes, and attends to these tokens and to the nodes on its path.

A node is kept if its parent is kept and its token is the one that sampling chooses behind the parent, with the random
number of that place. Outputs are therefore those without drafts, token for token. In distribution this is speculative
sampling from several candidates (arXiv:2305.09781, section 4.3) that are certain of themselves: one of the children is
kept with the sum of their probabilities, and the token is the model's own otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Draft(NamedTuple):
    """Proposed tokens."""

    tokens: list[int]
    parents: list[int] = []
    """For each the place in ``tokens`` of the one that it follows, which is before it; -1: the last known token. Empty:
    each follows the one before it."""


class Candidate(NamedTuple):
    """A node that could be drafted."""

    score: float
    """Log-probability of its path, as the drafter has it: never above its parent's."""
    level: int
    """1: follows the last known token."""
    parent: int
    """Its parent's place among the candidates, before its own; -1: there is none."""
    token: int


def tree_paths(start: int, draft: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """What the last known token, at place ``start``, and each drafted one attend to, behind the places before
    ``start``: places from the last known token's to its own."""
    paths: list[tuple[int, ...]] = [(start,)]
    for i in range(len(draft)):
        before = parents[i] if parents else i - 1
        paths.append((*paths[before + 1], start + 1 + i))
    return paths


def pruned(candidates: Sequence[Candidate], most: int, levels: int) -> Draft:
    """The ``most`` likeliest candidates of up to ``levels`` levels, which are a tree again (arXiv:2406.16858, section
    4.2): of equal scores those nearer to the root. In an order that begins with the likeliest path, so that this needs
    no copies when it is kept."""
    able = [i for i, c in enumerate(candidates) if c.level <= levels]
    chosen = sorted(able, key=lambda i: (-candidates[i].score, candidates[i].level, i))[:most]
    children: dict[int, list[int]] = {}
    for i in chosen:  # the likeliest first
        children.setdefault(candidates[i].parent, []).append(i)
    order: list[tuple[int, int]] = []
    stack = [(i, -1) for i in reversed(children.get(-1, []))]
    while stack:
        i, parent = stack.pop()
        order.append((i, parent))
        stack += [(child, len(order) - 1) for child in reversed(children.get(i, []))]
    parents = [parent for _, parent in order]
    tokens = [candidates[i].token for i, _ in order]
    return Draft(tokens, [] if parents == list(range(-1, len(parents) - 1)) else parents)


def child(draft: Sequence[int], parents: Sequence[int], node: int, token: int) -> int:
    """The child of ``node`` (-1: the last known token) that drafts ``token``; -1 if there is none."""
    if not parents:
        return node + 1 if node + 1 < len(draft) and draft[node + 1] == token else -1
    return next((i for i in range(node + 1, len(draft)) if parents[i] == node and draft[i] == token), -1)


def moves(start: int, kept: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(place, place where it belongs) of ``kept`` nodes, on one path, that are not where their tokens are when the last
    known one is at place ``start``."""
    return ((start + 1 + node, start + 1 + i) for i, node in enumerate(kept) if node != i)
