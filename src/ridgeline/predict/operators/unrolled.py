"""Cycles of arrays of multipliers that unroll a layer's loops, by counting partly filled passes.

An array has rows of multipliers whose products an adder tree sums. FlexFlow (Lu et al., HPCA 2017) compares three fixed
ways to unroll with its own, which chooses factors for each layer; DFX (arXiv:2209.10797) tiles: 64 inputs of 16 outputs
at a time. A layer has N input maps, M output maps and kernels of K × K. A matrix product is a layer with K = 1 whose
outputs are its rows: there every way but the two-dimensional one can fill the array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ridgeline.spec.efficiency import GemmConstants, Unrolling

Factors = tuple[int, int, int]
Array = tuple[int, int]
"""Multipliers whose products are summed, and the number of such sums."""


class Layer(NamedTuple):
    """One convolution, or a matrix product."""

    inputs: int
    """N, input maps: k of a product."""
    outputs: int
    """M, output maps: columns of a product."""
    size: tuple[int, int]
    """Rows and columns of an output map; of a product: (its rows, 1)."""
    kernel: int
    """K."""

    @property
    def positions(self) -> int:
        """Outputs of one map."""
        return self.size[0] * self.size[1]

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.inputs * self.outputs * self.positions * self.kernel**2


def two_dimensional(layer: Layer, array: Array) -> int:
    """Cycles where each multiplier computes one output of a map (ShiDianNao)."""
    passes = ceil(layer.size[0] / array[0]) * ceil(layer.size[1] / array[1])
    return passes * layer.inputs * layer.outputs * layer.kernel**2


def tiling(layer: Layer, array: Array) -> int:
    """Cycles where input maps are summed and output maps lie side by side (DianNao, DFX)."""
    return ceil(layer.inputs / array[0]) * ceil(layer.outputs / array[1]) * layer.positions * layer.kernel**2


def systolic_kernels(layer: Layer, array: Array, side: int) -> int:
    """Cycles where arrays of ``side`` × ``side`` hold one kernel each, as many as there are multipliers for."""
    arrays = array[0] * array[1] // (side * side)
    passes = ceil(layer.inputs * layer.outputs * ceil(layer.kernel / side) ** 2 / arrays)
    return passes * layer.positions


def flexible(layer: Layer, array: Array) -> int:
    """Cycles with the factors that fit this layer best (FlexFlow)."""
    return flexible_cycles([layer], factors([layer], array))


def rows_cycles(layer: Layer, within: Factors) -> int:
    """Passes over one output's products, unrolled by (Tn, Ti, Tj) over a row's multipliers."""
    n, i, j = within
    return ceil(layer.inputs / n) * ceil(layer.kernel / i) * ceil(layer.kernel / j)


def columns_cycles(layer: Layer, across: Factors) -> int:
    """Passes over the outputs, unrolled by (Tm, Tr, Tc) over the rows."""
    m, r, c = across
    return ceil(layer.outputs / m) * ceil(layer.size[0] / r) * ceil(layer.size[1] / c)


def factors(layers: Sequence[Layer], array: Array) -> list[tuple[Factors, Factors]]:
    """((Tm, Tr, Tc), (Tn, Ti, Tj)) of each layer with the fewest cycles (FlexFlow's equations 1 to 3).

    A layer's results lie where the next one reads them: its (Tm, Tr, Tc) are the next one's (Tn, Ti, Tj).
    """
    first = layers[0]
    best = {within: (0, [within]) for within in _factors((first.inputs, first.kernel, first.kernel), array[0])}
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        high, wide = layer.size if after is None else (min(side, after.kernel) for side in layer.size)
        choices = list(_factors((layer.outputs, high, wide), array[1]))
        each = {within: rows_cycles(layer, within) for within in best}
        cheapest: dict[int, tuple[int, list[Factors]]] = {}
        found: dict[Factors, tuple[int, list[Factors]]] = {}
        for across in choices:
            outer = columns_cycles(layer, across)
            if outer not in cheapest:
                within = min(best, key=lambda w: best[w][0] + outer * each[w])
                cheapest[outer] = (best[within][0] + outer * each[within], best[within][1])
            cycles, path = cheapest[outer]
            found[across] = (cycles, [*path, across])
        best = found
    path = min(best.values())[1]
    return list(zip(path[1:], path, strict=False))


def flexible_cycles(layers: Sequence[Layer], chosen: Sequence[tuple[Factors, Factors]]) -> int:
    """Cycles of all layers with these factors."""
    each = zip(layers, chosen, strict=True)
    return sum(columns_cycles(layer, across) * rows_cycles(layer, within) for layer, (across, within) in each)


def utilization(layers: Sequence[Layer], cycles: int, array: Array) -> float:
    """Share of the multipliers that work, over all layers."""
    return sum(layer.macs for layer in layers) / (cycles * array[0] * array[1])


_WAYS: dict[Unrolling, Callable[[Layer, Array], int]] = {
    "tiling": tiling, "two_dimensional": two_dimensional, "flexible": flexible,
}  # fmt: skip


@lru_cache(maxsize=65536)
def product_cycles(way: Unrolling, array: Array, rows: int, columns: int, k: int) -> int:
    """Cycles of (rows × k) · (k × columns) on one array."""
    return _WAYS[way](Layer(k, columns, (rows, 1), 1), array)


def product_seconds(c: GemmConstants, peak: float, each: float, groups: float, columns: int, k: int) -> float:
    """Seconds of ``groups`` independent products of ``each`` rows at a peak of ``peak`` FLOP/s.

    Rows wait for one another where they pass one by one (``row_latency``); independent products do not.
    """
    passes = groups * product_cycles(c.unrolling, c.array, ceil(each), columns, k)
    return passes * 2 * c.array[0] * c.array[1] / (peak * c.share) + each * c.row_latency


@lru_cache
def _factors(most: Factors, d: int) -> tuple[Factors, ...]:
    """All factors of at most these and a product of at most ``d``."""
    return tuple(_bounded(most, d))


def _bounded(most: Factors, d: int) -> Iterator[Factors]:
    for a, b in itertools.product(range(1, min(most[0], d) + 1), range(1, min(most[1], d) + 1)):
        if a * b <= d:
            yield from ((a, b, c) for c in range(1, min(most[2], d // (a * b)) + 1))
