"""The pace of a training step: where it applies, and the published run on H100 that its clocks were set by."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.predict.pace import ALONE, TRAINING, group, throttle, training_pace
from ridgeline.spec.device import Rate


def test_groups():
    assert [group(k) for k in ("gemm", "bmm", "attention", "norm", "loss")] == ["gemm", "gemm", "attention"] + [
        "pointwise"
    ] * 2
    assert TRAINING.of("gemm") == TRAINING.gemm
    assert TRAINING.of("optimizer") == TRAINING.of("quantise") == 1.0, "fused as they are counted"


def test_a_cpu_and_a_measured_device_keep_their_own_pace():
    assert training_pace(catalog.cluster("2xxeon"), fused=False) == ALONE
    gpu = catalog.cluster("8xa100")
    measured = gpu.device.model_copy(update={"rates": {"gemm.bf16": Rate(flop_rate=1e14)}})
    assert training_pace(gpu.model_copy(update={"device": measured}), fused=False).gemm == 1.0
    assert training_pace(gpu, fused=True).pointwise < training_pace(gpu, fused=False).pointwise


def test_power_limits():
    assert throttle(catalog.device("a100")) == 1.0
    assert throttle(catalog.device("h100")) == pytest.approx(1.2, abs=0.01)
    assert throttle(catalog.device("h20")) == 1.0, "little arithmetic for its watts"
    assert max(throttle(catalog.device(name)) for name in catalog.devices()) <= 1.2


def test_the_slowest_of_many_ranks():
    assert TRAINING.straggling(1) == 0.0
    assert 0 < TRAINING.straggling(8) < TRAINING.straggling(1024) < 0.03


@pytest.mark.parametrize(("ranks", "batch", "published"), [(8192, 2048, 0.43), (16384, 2048, 0.41)])
def test_llama_3_405b(ranks, batch, published):
    """arXiv:2407.21783, table 4: 8192 tokens, tp 8, pp 16, bf16 (two of the 128 places for layers are left empty)."""
    spec = catalog.model("llama3-70b").model_dump() | {
        "name": "llama3-405b", "num_layers": 128, "hidden_size": 16384, "num_heads": 128, "intermediate_size": 53248,
    }  # fmt: skip
    plan = ["mixed_precision:weights=low", "flash_attention", "fused_layers", "tensor_parallel:degree=8",
            "sequence_parallel", "pipeline:degree=16,schedule=interleaved,chunks=8", "zero:stage=2"]  # fmt: skip
    workload = {"kind": "pretrain", "seq_len": 8192, "batch_size": batch, "micro_batch_size": 1}
    r = predict(experiments.make(spec, f"{ranks // 8}x8xh100", workload, plan))
    # Published MFU counts all of the causal attention's products, as does ours.
    assert r.metrics["mfu"].value == pytest.approx(published, rel=0.12)
