"""Utilization of arrays of multipliers by how they unroll a layer's loops, by counting partly filled passes.

FlexFlow (Lu et al., HPCA 2017) compares three fixed ways with its own, which chooses factors for each layer. A layer
has N input maps, M output maps of S × S and kernels of K × K; an array has D × D multipliers. A matrix product is a
layer with K = 1 whose outputs are its rows: there every way but the two-dimensional one fills the array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

Factors = tuple[int, int, int]


class Layer(NamedTuple):
    """One convolution."""

    inputs: int
    """N, input maps."""
    outputs: int
    """M, output maps."""
    size: int
    """S, rows and columns of an output map."""
    kernel: int
    """K."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.inputs * self.outputs * self.size**2 * self.kernel**2


def two_dimensional(layer: Layer, d: int) -> int:
    """Cycles where each multiplier computes one output of a map (ShiDianNao)."""
    return ceil(layer.size / d) ** 2 * layer.inputs * layer.outputs * layer.kernel**2


def tiling(layer: Layer, d: int) -> int:
    """Cycles where rows are output maps and columns input maps (DianNao)."""
    return ceil(layer.inputs / d) * ceil(layer.outputs / d) * layer.size**2 * layer.kernel**2


def systolic_kernels(layer: Layer, d: int, side: int) -> int:
    """Cycles where arrays of ``side`` × ``side`` hold one kernel each, as many as fit into d × d multipliers."""
    arrays = d * d // (side * side)
    passes = ceil(layer.inputs * layer.outputs * ceil(layer.kernel / side) ** 2 / arrays)
    return passes * layer.size**2


def rows_cycles(layer: Layer, within: Factors) -> int:
    """Passes over one output's products, unrolled by (Tn, Ti, Tj) over a row's multipliers."""
    n, i, j = within
    return ceil(layer.inputs / n) * ceil(layer.kernel / i) * ceil(layer.kernel / j)


def columns_cycles(layer: Layer, across: Factors) -> int:
    """Passes over the outputs, unrolled by (Tm, Tr, Tc) over the rows."""
    m, r, c = across
    return ceil(layer.outputs / m) * ceil(layer.size / r) * ceil(layer.size / c)


def flexible(layers: Sequence[Layer], d: int) -> list[tuple[Factors, Factors]]:
    """((Tm, Tr, Tc), (Tn, Ti, Tj)) of each layer with the fewest cycles (FlexFlow's equations 1 to 3).

    A layer's results lie where the next one reads them: its (Tm, Tr, Tc) are the next one's (Tn, Ti, Tj).
    """
    first = layers[0]
    best = {within: (0, [within]) for within in _factors((first.inputs, first.kernel, first.kernel), d)}
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        reach = layer.size if after is None else min(layer.size, after.kernel)
        choices = list(_factors((layer.outputs, reach, reach), d))
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


def flexible_cycles(layers: Sequence[Layer], factors: Sequence[tuple[Factors, Factors]]) -> int:
    """Cycles of all layers with these factors."""
    each = zip(layers, factors, strict=True)
    return sum(columns_cycles(layer, across) * rows_cycles(layer, within) for layer, (across, within) in each)


def utilization(layers: Sequence[Layer], cycles: int, d: int) -> float:
    """Share of the multipliers that work, over all layers."""
    return sum(layer.macs for layer in layers) / (cycles * d * d)


@lru_cache
def _factors(most: Factors, d: int) -> tuple[Factors, ...]:
    """All factors of at most these and a product of at most ``d``."""
    return tuple(_bounded(most, d))


def _bounded(most: Factors, d: int) -> Iterator[Factors]:
    for a, b in itertools.product(range(1, min(most[0], d) + 1), range(1, min(most[1], d) + 1)):
        if a * b <= d:
            yield from ((a, b, c) for c in range(1, min(most[2], d // (a * b)) + 1))
