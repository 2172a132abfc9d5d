"""In-step factors of a training step: where they apply."""

from ridgeline import catalog
from ridgeline.predict.step.in_step import ALONE, TRAINING, group, throttle, training_factors
from ridgeline.spec.device import Rate


def test_groups():
    assert [group(k) for k in ("gemm", "bmm", "attention", "norm", "loss")] == ["gemm", "gemm", "attention"] + [
        "pointwise"
    ] * 2
    assert TRAINING.of("gemm") == TRAINING.gemm
    assert TRAINING.of("optimizer") == TRAINING.of("quantize") == 1.0, "fused as they are counted"


def test_a_cpu_and_a_measured_device_keep_their_own_pace():
    assert training_factors(catalog.cluster("2xxeon"), fused=False) == ALONE
    gpu = catalog.cluster("8xa100")
    measured = gpu.device.model_copy(update={"rates": {"gemm.bf16": Rate(flop_rate=1e14)}})
    assert training_factors(gpu.model_copy(update={"device": measured}), fused=False).gemm == 1.0
    assert training_factors(gpu, fused=True).pointwise < training_factors(gpu, fused=False).pointwise


def test_power_limits():
    """More FLOP/s per watt than an A100's last less; a device with fewer is not throttled."""
    factor = {name: throttle(catalog.device(name)) for name in ("a100", "h100", "h200", "h20")}
    assert factor["a100"] == factor["h20"] == 1.0
    assert factor["h100"] == factor["h200"] > 1.0, "the same chip at the same power"


def test_the_slowest_of_many_ranks():
    assert TRAINING.straggling(1) == 0.0
    assert 0 < TRAINING.straggling(8) < TRAINING.straggling(1024) < 0.03
