"""Every family that the engine runs trains, alone and cut over ranks, to the same losses."""

import functools

import pytest
from tests.nn.conftest import CONFIGS
from tests.training import experiment, train

from ridgeline.spec.model import ModelSpec

SHARDED = ["llama", "llama_mha_bias_tied", "qwen3", "qwen3_moe", "deepseek_v3", "phi3", "granite", "mixtral", "gpt2",
           "bert"]  # fmt: skip


def family(name, corpus, *plan, ranks=1):
    model = ModelSpec.from_config({**CONFIGS[name], "vocab_size": 300}, name=name)
    return experiment(corpus, *plan, ranks=ranks, model=model, optimizer="sgd", lr=1.0, warmup_steps=0, steps=4)


@pytest.fixture(scope="module")
def reference(corpus):
    """The plain plan's curve, of each model once; it must move enough for the comparisons to see something."""

    @functools.cache
    def run(name):
        curve = train(family(name, corpus), uneven=name != "bert")
        assert curve.signal > 0.02
        if name != "bert":  # masked batches differ too much from one another for a fall in four steps
            assert curve.losses[-1] < curve.losses[0]
        return curve

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process(name, corpus, reference):
    other = train(family(name, corpus, "flash_attention", "recompute"), uneven=name != "bert")
    assert other.losses == pytest.approx(reference(name).losses, rel=1e-5)


@pytest.mark.parametrize(("name", "plan"), [
    pytest.param(name, plan, marks=pytest.mark.nightly if (i + j) % 3 else [])  # by day one of each family
    for i, name in enumerate(SHARDED) for j, plan in enumerate(("data_parallel", "zero:stage=2", "zero:stage=3"))
])  # fmt: skip
def test_two_ranks(name, plan, corpus, reference):
    other = train(family(name, corpus, plan, ranks=2), uneven=name != "bert")
    expected = reference(name)
    assert other.losses == pytest.approx(expected.losses, rel=1e-5)
    assert other.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen2", "bert"])
def test_adapters_on_integer_weights(name, corpus):
    curve = train(family(name, corpus, "lora:targets=q_proj+o_proj", "rtn"), uneven=name != "bert")
    assert curve.moved > 0
    assert {n.rpartition(".")[2] for n in curve.trained} == {"lora_a", "lora_b"}


DIVIDED = ["expert_parallel:degree=2", "tensor_parallel:degree=2", "tensor_parallel:degree=2+sequence_parallel",
           "pipeline:degree=2"]  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_dense_between"])
@pytest.mark.parametrize("plan", DIVIDED)
def test_shared_experts_divided(name, plan, corpus, reference):
    other = train(family(name, corpus, *plan.split("+"), ranks=2))
    expected = reference(name)
    assert other.losses == pytest.approx(expected.losses, rel=1e-5)
    assert other.norms == pytest.approx(expected.norms, rel=1e-4)
