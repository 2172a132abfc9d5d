"""Calibration on synthetic rows: constants that made the times come back."""

import itertools
import random

import pytest

from ridgeline import catalog
from ridgeline.graph import Op
from ridgeline.predict.calibrate import TimedSample, calibrate
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.device import Cluster

DEVICE = catalog.device("a100-80g-sxm")


def gemms():
    rng = random.Random(1)
    for _ in range(220):
        m, n, k = (2 ** rng.randint(*r) for r in ((0, 13), (7, 15), (7, 14)))
        moved = 2.0 * (m * k + n * k + m * n)
        yield Op("x", "mlp", "gemm", flops=2.0 * m * n * k, bytes=moved, dtype="bf16", shape=(m, n, k))


def decodes():
    for batch, kv_heads, kv in itertools.product((1, 8, 64, 256), (1, 4, 8), (16, 256, 2048, 8192)):
        yield Op("x", "attention", "attention", dtype="bf16", shape=(batch, 32, kv_heads, 1, kv, 128), causal=True)


def collectives():
    for kind, n, i in itertools.product(("all_reduce", "all_gather", "alltoall"), (2, 4, 8), range(9, 29)):
        yield Op("x", "communication", kind, link_bytes=2.0**i, ranks=n, axis="tp", dtype="fp16")


def truth(device, noise=0.02):
    """Rows as ``device`` would give them, with two per cent of noise."""
    rng = random.Random(2)
    for op in gemms():
        yield TimedSample((op,), op_time(op, device).seconds * rng.gauss(1, noise))
    for op in decodes():
        yield TimedSample((op,), op_time(op, device).seconds * rng.gauss(1, noise))
    for op in collectives():
        cluster = Cluster(device=device, devices_per_node=op.ranks)
        yield TimedSample((op,), collective_time(op, cluster).seconds * rng.gauss(1, noise))


@pytest.fixture(scope="module")
def odd():
    """A card that is like an A100 but slower in every respect that matters."""
    e = catalog.efficiency(DEVICE)
    g = e.gemm["bf16"].model_copy(update={"share": 0.6, "latency": 6e-6, "memory_share": 0.5})
    d = e.decode["flash"].model_copy(update={"latency": 25e-6, "memory_share": 0.5})
    c = e.collective.model_copy(update={"latency": 20e-6, "bandwidth_share": 0.4})
    changed = e.model_copy(
        update={
            "gemm": {**e.gemm, "bf16": g},
            "decode": {**e.decode, "flash": d},
            "collective": c,
            "clock": DEVICE.clock,
        }
    )
    return DEVICE.model_copy(update={"efficiency": changed})


@pytest.fixture(scope="module")
def result(odd):
    return calibrate(truth(odd), DEVICE)


def test_every_family_is_fitted_and_better(result):
    assert {f.family for f in result.fits} == {"gemm bf16", "decode flash", "collective"}
    for fit in result.fits:
        assert fit.after < 0.04
        assert fit.after < fit.before / 5


def test_the_constants_come_back(result, odd):
    got, made = result.efficiency, odd.efficiency
    assert got.gemm["bf16"].share == pytest.approx(0.6, rel=0.05)
    assert got.gemm["bf16"].latency == pytest.approx(6e-6, rel=0.1)
    assert got.gemm["bf16"].memory_share == pytest.approx(0.5, rel=0.05)
    assert got.collective.bandwidth_share == pytest.approx(0.4, rel=0.05)
    assert got.collective.latency == pytest.approx(20e-6, rel=0.1)
    assert got.prefill == made.prefill  # no rows: as it was


def test_it_holds_on_other_shapes_and_says_so(result, odd):
    device = result.on(DEVICE)
    for m, n, k in ((3, 5000, 3000), (777, 3333, 5555), (5000, 5000, 5000)):
        op = Op(
            "x",
            "mlp",
            "gemm",
            flops=2.0 * m * n * k,
            bytes=2.0 * (m * k + n * k + m * n),
            dtype="bf16",
            shape=(m, n, k),
        )
        assert op_time(op, device).seconds == pytest.approx(op_time(op, odd).seconds, rel=0.08)
        assert op_time(op, device).source == "measured profile"
        assert op_time(op, device).spread < op_time(op, DEVICE).spread


def test_a_calibrated_device_is_a_toml_file(result, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    device = result.on(DEVICE)
    path = catalog.save_device(device)
    again = catalog.device(str(path))
    assert again.efficiency == device.efficiency


def test_few_rows_change_nothing():
    few = calibrate(list(truth(DEVICE))[:5], DEVICE)
    assert few.fits == []
    assert few.efficiency.gemm == catalog.efficiency(DEVICE).gemm
