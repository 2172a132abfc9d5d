"""How a training run divides its model and batch: what a row states of it, and what it leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from ridgeline.spec.device import Cluster
from ridgeline.spec.model import ModelSpec
from ridgeline.validate.csv_table import BadCell, CsvRow

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
WHOLE = ("full", "1", "true", "yes", "block", "uniform", "all")
"""What columns call the recomputation of whole layers."""
_NOT, _PARTLY = ("none", "no", "false", "0", "off"), ("sel", "op", "attn")
"""And none of it, and (how names begin) that of a part of their operators."""
_SIMPLER = 0.95
"""A layout with less model parallelism is preferred if it has this fraction of the best one's tokens/s (assumption)."""


class Layout(NamedTuple):
    """The layout of a run. ``cp`` is 1 unless stated, degrees whose column is missing are 1, and ZeRO's stage is then
    the software's usual one; any other part may be open."""

    tp: int
    pp: int
    cp: int
    zero_stage: int
    micro_batch: int
    interleave: int
    recompute: str

    @property
    def model_ranks(self) -> int:
        """Number of devices that share one sequence."""
        return self.tp * self.pp * self.cp

    def is_within(self, other: Layout) -> bool:
        """Whether it takes no more memory than ``other``: the same division and micro-batch without interleaving, with
        as much recomputation. (Smaller micro-batches may take more: their gradients are added up.)"""
        same = self[:5] == other[:5] and self.interleave == 1
        return same and self.recompute in ("full", other.recompute)


class Judged(NamedTuple):
    """A layout with what was predicted of it."""

    layout: Layout
    fits: bool
    merit: float
    """Tokens/s, or where it does not fit, minus the peak of memory."""


def layouts(row: CsvRow, spec: ModelSpec, cluster: Cluster, usual_stage: int) -> list[Layout]:
    """The layouts that the row allows; ``usual_stage``: ZeRO's in its software. Raises :class:`BadCell` for degrees
    that are no whole numbers, and for a recomputation of another name."""
    recompute = _recomputation(row)
    stages = [0, 1, 3] if _is_open(row, "zero_stage") else [min(3, row.count("zero_stage", usual_stage, least=0))]
    found: list[tuple[int, int, int, int, int, int, str]] = []
    for tp, pp, cp in _degrees(row, spec, cluster):
        ranks = cluster.size // (tp * pp * cp) or 1
        each = max(1, row.count("global_batch", ranks) // ranks)
        micro = [row.count("micro_batch")] if row.has("micro_batch") else [n for n in _MICRO_BATCHES if each % n == 0]
        chunks = [n for n in range(1, spec.num_layers // pp + 1) if spec.num_layers % (pp * n) == 0]
        interleave = sorted({1, *chunks[-1:]}) if pp > 1 else [1]
        found += product(
            [tp], [pp], [cp],
            stages if ranks > 1 or len(stages) == 1 else [0],
            micro,
            [row.count("interleave")] if row.has("interleave") else interleave,
            recompute,
        )  # fmt: skip
    row.assumed.pop("global_batch", None)
    return [Layout(*parts) for parts in found]


def _recomputation(row: CsvRow) -> list[str]:
    stated = row.cells.get("recompute", "").strip().lower()
    named = row.has("recompute") or stated == "none"
    if named and stated not in WHOLE + _NOT and not stated.startswith(_PARTLY):
        raise BadCell(f"column 'recompute': {stated!r} is neither full nor selective nor none")
    return [stated] if named else ["none", "full"]


def _degrees(row: CsvRow, spec: ModelSpec, cluster: Cluster) -> list[tuple[int, int, int]]:
    """Degrees (tp, pp, cp): where they are open, those with as many replicas as the row's ``dp`` states, or powers of
    two: tensor parallelism within a node and stages of equal size."""
    cp = row.count("cp", 1)
    tensor = _degree(row, "tp", math.gcd(spec.num_heads, cluster.devices_per_node))
    stages = _degree(row, "pp", math.gcd(spec.num_layers, cluster.size))
    if not _is_open(row, "tp") and not _is_open(row, "pp"):
        return [(tensor[0], stages[0], cp)]
    known = _of_replicas(row, spec, cluster, cp) if row.has("dp") else []
    pairs = [(tp, pp, cp) for tp in tensor for pp in stages if cluster.size % (tp * pp * cp) == 0]
    return known or pairs or [(tensor[0], stages[0], cp)]


def _of_replicas(row: CsvRow, spec: ModelSpec, cluster: Cluster, cp: int) -> list[tuple[int, int, int]]:
    """Degrees with which the stated ``dp`` replicas are the whole cluster; empty: the row's cells contradict it."""
    shared, rest = divmod(cluster.size, row.count("dp") * cp)
    if rest:
        return []
    heads = [row.count("tp", 1)] if not _is_open(row, "tp") else _divisors(spec.num_heads)
    found = [(tp, shared // tp, cp) for tp in heads if shared % tp == 0 and shared // tp <= spec.num_layers]
    if not _is_open(row, "pp"):
        found = [d for d in found if d[1] == row.count("pp", 1)]
    usual = [(tp, pp, cp) for tp, pp, _ in found if cluster.devices_per_node % tp == 0 == spec.num_layers % pp]
    return usual or found


def _is_open(row: CsvRow, column: str) -> bool:
    """Whether the column is there and its cell empty."""
    return column in row.cells and not row.has(column)


def _degree(row: CsvRow, column: str, size: int) -> list[int]:
    """The degree that is stated, or where the cell is empty the powers of two that divide ``size``."""
    if _is_open(row, column):
        return [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return [row.count(column, 1)]


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def smallest_first(allowed: Iterable[Layout]) -> list[Layout]:
    """The layouts in an order in which those that are :meth:`Layout.is_within` others come before them."""
    return sorted(allowed, key=lambda a: (a[:4], a.interleave, a.micro_batch, a.recompute != "full"))


def best(judged: Iterable[Judged], usual_stage: int) -> Layout:
    """The layout that a user would take, of one or more: the fastest that fits; of those within 5 % of it that with the
    least model parallelism, then that with the software's usual stage of ZeRO. Where none fits: the smallest."""
    groups: dict[tuple[int, int], Judged] = {}
    for j in judged:
        key = (j.layout.model_ranks, abs(j.layout.zero_stage - usual_stage))
        if key not in groups or (j.fits, j.merit) > (groups[key].fits, groups[key].merit):
            groups[key] = j
    fastest = max(groups.values(), key=lambda j: (j.fits, j.merit))
    if not fastest.fits:
        return fastest.layout
    near = [key for key, j in groups.items() if j.fits and j.merit >= _SIMPLER * fastest.merit]
    return groups[min(near)].layout


def say(row: CsvRow, chosen: Layout, allowed: list[Layout]) -> str:
    """Note in the row what was taken for its empty cells; in words, the parts that had more than one choice."""
    several = [name for i, name in enumerate(Layout._fields) if len({layout[i] for layout in allowed}) > 1]
    alone = [name for name in ("tp", "pp", "zero_stage", "micro_batch", "interleave") if name not in several]
    if chosen.pp == 1:
        several, alone = ([name for name in names if name != "interleave"] for names in (several, alone))
    for name in (*alone, *several):
        if _is_open(row, name):
            row.assumed[name] = str(getattr(chosen, name))
    return "not stated: " + ", ".join(f"{name}={getattr(chosen, name)}" for name in several) if several else ""
