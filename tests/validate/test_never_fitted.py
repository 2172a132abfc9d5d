"""Kernels and collectives on which nothing was fitted, against public tables (``never_fitted_rows``).

Bounds are goals that were set before the rows were looked up; a class that misses one fails strictly. Predicted is as
for a user who names the device: by the catalog's constants of its architecture. Tables of single launches have a floor,
the host's: of those, rows of at least twice the least time are judged.
"""

from math import log
from statistics import fmean, median

import pytest
from tests import never_fitted_rows as rows

from ridgeline import catalog
from ridgeline.graph import Op
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.device import DTYPE_BYTES, Cluster


def above_the_floor(table):
    return [row for row in table if row.seconds >= 2 * min(other.seconds for other in table)]


CLASSES = {  # rows, goals for the median and for the mean
    "products in 8 bits, H800": (rows.H800_PRODUCTS + rows.H800_GROUPED, 0.15, 0.25),
    "products in 8 bits, H800, two months later": (rows.H800_LATER, 0.15, 0.25),
    "products in 8 bits, H200": (above_the_floor(rows.H200_PRODUCTS) + rows.BEST_ON_HOPPER, 0.15, 0.25),
    "products, Blackwell": (above_the_floor(rows.B200_SQUARE) + rows.B200_LINEAR + rows.BEST_SHAPES, 0.12, None),
    "prompts, H20 and H200": (rows.HOPPER_PREFILL, 0.20, None),
    "prompts, Blackwell": (rows.B200_PREFILL, 0.20, None),
    "decode attention, H20 and H100": (
        rows.H20_LATENT + rows.H20_LATENT_LONG + rows.H20_SHARED + rows.H100_LATENT, 0.15, 0.25),
    "decode attention, Blackwell": (rows.B200_DECODE, 0.20, None),
    "a node, H200": (above_the_floor(rows.H200_NODE) + above_the_floor(rows.H200_AZURE) + rows.H200_RINGS, 0.15, None),
    "a node or rack, Blackwell": (above_the_floor(rows.B200_NODE) + rows.GB200_RACK, 0.15, None),
    "nodes, Hopper": (rows.H100_EIGHT_NODES + rows.H200_FOUR_NODES + rows.H20_TWO_NODES, 0.25, None),
    "nodes and racks, Blackwell": (above_the_floor(rows.B200_FOUR_NODES) + rows.GB200_TWO_RACKS, 0.25, None),
}  # fmt: skip


MISSED = {
    "products, Blackwell": "the least time of a kernel is longer than on Hopper; 750 W leave less than assumed",
    "decode attention, Blackwell": "short caches: the kernel's fixed time is Hopper's",
    "a node or rack, Blackwell": "sums in the switch start more slowly below 256 MiB, and the more so the more ranks",
}


def goals():
    for kind in CLASSES:
        missed = [pytest.mark.xfail(strict=True, reason=MISSED[kind])] if kind in MISSED else []
        yield pytest.param(kind, marks=missed)


def predicted(row):
    device = catalog.device(row.device)
    if isinstance(row, rows.Collective):
        op = Op(row.kind, "communication", row.kind, dtype="fp32", link_bytes=row.size, ranks=row.local * row.nodes,
                axis="dp")  # fmt: skip
        return collective_time(op, Cluster(device=device, devices_per_node=row.local, nodes=row.nodes))
    if isinstance(row, rows.Attention):
        batch, heads, _, queries, keys, dim = row.shape
        op = Op("attention", "attention", "attention", flops=4.0 * batch * heads * queries * keys * dim, dtype="bf16",
                shape=row.shape, causal=row.causal, kernel=row.kernel)  # fmt: skip
        return op_time(op, device)
    if row.watts:
        device = device.model_copy(update={"watts": row.watts})
    m, n, k = row.shape
    width, count = DTYPE_BYTES[row.dtype], row.groups * m
    weights = row.groups * n * k * width
    op = Op("gemm", "mlp", "gemm", flops=2.0 * count * n * k, bytes=count * k * width + weights + 2.0 * count * n,
            dtype=row.dtype, shape=(count, n, k), experts=row.groups, reuse=weights if row.warm else 0.0)  # fmt: skip
    return op_time(op, device)


@pytest.mark.parametrize("kind", goals())
def test_goals(kind):
    table, middle, mean = CLASSES[kind]
    errors = [predicted(row).seconds / row.seconds - 1 for row in table]
    sizes = [abs(e) for e in errors]
    print(f"{kind}: {len(table)} rows, median {median(sizes):.1%}, mean {fmean(sizes):.1%}, {fmean(errors):+.1%}")
    print([f"{e:+.0%}" for e in errors])
    assert median(sizes) <= middle
    assert mean is None or fmean(sizes) <= mean


@pytest.mark.parametrize(("single", "judged", "others", "goal"), [
    (rows.B200_SQUARE, rows.B200_SQUARE, [], 0.12),
    pytest.param(rows.B200_SQUARE, above_the_floor(rows.B200_SQUARE), rows.B200_LINEAR + rows.BEST_SHAPES, 0.12,
                 marks=pytest.mark.xfail(strict=True, reason="fp8 kernels of few rows take longer than on Hopper")),
    (rows.B200_NODE, above_the_floor(rows.B200_NODE), rows.GB200_RACK, 0.15),
])  # fmt: skip
def test_goals_less_what_a_single_launch_takes(single, judged, others, goal):
    """What the least row of a table of single launches takes beyond its prediction, all of them take: it is the
    measurement's."""
    least = min(single, key=lambda row: row.seconds)
    launch = least.seconds - predicted(least).seconds
    pairs = [(row, row.seconds - launch) for row in judged if row != least]
    pairs += [(row, row.seconds) for row in others]
    sizes = [abs(predicted(row).seconds / seconds - 1) for row, seconds in pairs]
    print(f"{launch:.2e} s, {len(sizes)} rows, median {median(sizes):.1%}, mean {fmean(sizes):.1%}")
    assert median(sizes) <= goal


def test_intervals_hold_95_percent():
    judged = [row for table, *_ in CLASSES.values() for row in table]
    found = [(row, predicted(row)) for row in judged]
    outside = [row for row, t in found if abs(log(t.seconds / row.seconds)) > 1.96 * t.spread]
    print(f"{len(outside)} of {len(judged)} outside: {outside}")
    assert len(outside) <= 0.05 * len(judged)
