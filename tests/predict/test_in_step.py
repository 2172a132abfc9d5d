"""In-step factors of a training step: where they apply."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import training_graph
from ridgeline.graph.graph import BIASED, Op
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.predict.step.in_step import ALONE, TRAINING, group, sustained_share, training_factors
from ridgeline.spec.device import Rate
from ridgeline.techniques.registry import resolve


def test_groups():
    device = catalog.device("a100")

    def factor(kind, kernel=""):
        return TRAINING.seconds(Op("x", "mlp", kind, kernel=kernel), 1.0, device)

    kinds = ("gemm", "bmm", "attention", "norm", "loss")
    assert [group(k) for k in kinds] == ["gemm", "gemm", "attention", "pointwise", "pointwise"]
    assert factor("gemm") == TRAINING.gemm
    assert factor("optimizer") == factor("quantize") == 1.0, "fused as they are counted"
    assert factor("attention", BIASED) == TRAINING.biased > factor("attention")


@pytest.mark.parametrize(("position", "option", "kernel"), [
    ("rope", "flash_attention", ""), ("alibi", "flash_attention", BIASED),
    ("rope", "flash_attention:generation=1", BIASED), ("rope", "flash_attention:generation=3", ""),
])  # fmt: skip
def test_kernels_with_a_bias_and_of_the_first_generation(position, option, kernel):
    asked = experiments.make("llama2-7b", "a100", {"kind": "pretrain", "seq_len": 512}, [option])
    model = asked.model.model_copy(update={"position": position})
    e, techniques = resolve(asked.model_copy(update={"model": model}))
    ops = [op for b in rewritten(training_graph(e), e, techniques).blocks for op in (*b.forward, *b.backward)]
    assert {op.kernel for op in ops if op.kind == "attention"} == {kernel}


def test_kernels_of_ampere_are_slower_on_hopper():
    def rate(generation):
        plan = ["mixed_precision", f"flash_attention:generation={generation}"]
        return predict(experiments.make("llama2-7b", "h100", {"kind": "pretrain", "seq_len": 4096}, plan)).metrics

    step = [rate(n)["step_time_s"].value for n in (1, 2, 3)]
    assert step == sorted(step, reverse=True)
    assert step[0] > step[2]


def test_a_cpu_and_a_measured_device_keep_their_own_pace():
    assert training_factors(catalog.cluster("2xxeon"), fused=False) == ALONE
    gpu = catalog.cluster("8xa100")
    measured = gpu.device.model_copy(update={"rates": {"gemm.bf16": Rate(flop_rate=1e14)}})
    assert training_factors(gpu.model_copy(update={"device": measured}), fused=False).gemm == 1.0
    assert training_factors(gpu, fused=True).pointwise < training_factors(gpu, fused=False).pointwise


def test_power_limits():
    """A card that is short of watts sustains less of its peak; what does not reach that share is not slowed."""
    share = {name: sustained_share(catalog.device(name)) for name in ("a100", "h100", "h200", "h20")}
    assert share["a100"] == share["h20"] == 1.0
    assert share["h100"] == share["h200"] < 1.0, "the same chip at the same power"
    assert sustained_share(catalog.device("h100-96g-hbm2e-500w")) < share["h100"]
    h100 = catalog.device("h100")
    hot = ALONE._replace(sustained=0.6)
    product = Op("x", "mlp", "gemm", flops=h100.peak_flops["bf16"] * 0.5, dtype="bf16")
    assert hot.seconds(product, 0.7, h100) == pytest.approx(0.5 / 0.6)
    assert hot.seconds(product, 0.9, h100) == 0.9


def test_the_slowest_of_many_ranks():
    assert TRAINING.straggling(1) == 0.0
    assert 0 < TRAINING.straggling(8) < TRAINING.straggling(1024) < 0.03
