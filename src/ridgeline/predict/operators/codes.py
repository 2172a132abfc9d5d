"""Products of our kernels for weights in codes on GPUs (:mod:`ridgeline.nn.kernels.lowbit_matmul`): how many codes a
processor widens and multiplies in a clock, where the memory would deliver more.

Rates are of one H100, by its data sheet's clock: a weight of 14336 outputs and 4096 inputs, of fp8 between two
(``benchmarks/results/gpu_h100/kernels.json``). Between numbers of rows they are interpolated; of more rows than a tile
has, codes are widened again.
"""

from __future__ import annotations

from itertools import pairwise

from ridgeline.graph.graph import Op
from ridgeline.predict.machine import Machine

CODES = "codes "
"""What the ``kernel`` of these products begins with; behind it is the kind of the codes."""
RATES = {
    "int4": ((8, 13.0), (16, 10.5), (64, 6.5)),
    "int8": ((8, 7.7), (64, 6.3)),
    "mxfp4": ((8, 7.4), (64, 4.6)),
    "fp8": ((8, 8.6), (16, 6.6), (64, 4.1)),
}
"""(rows, codes in a clock of a processor), by the kind of codes."""
TILE = 64
"""Rows of a tile."""


def codes_seconds(op: Op, m: Machine) -> float:
    """Least seconds of a product by what processors do with the weight's codes; 0: it is not known, or another
    kernel's."""
    known = RATES.get(op.kernel.removeprefix(CODES)) if op.kernel.startswith(CODES) else None
    if known is None:
        return 0.0
    rows, out, inner = op.shape
    each = rows / max(1.0, op.experts)
    first, last = known[0][1], known[-1][1]
    clocks = 1 / first if each <= known[0][0] else max(1.0, each / TILE) / last
    for (fewer, fast), (more, slow) in pairwise(known):
        if fewer < each <= more:
            part = (each - fewer) / (more - fewer)
            clocks = (1 - part) / fast + part / slow
    return max(1.0, op.experts) * out * inner * clocks / (m.units * m.clock)
