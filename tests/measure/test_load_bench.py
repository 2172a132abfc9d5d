"""A serving experiment measured in one go: our server or the Hugging Face baseline, and the same requests for both."""

import pytest
from tests.serving import spec

from ridgeline import catalog
from ridgeline.measure.ablate import measure_plan
from ridgeline.measure.backends import require
from ridgeline.measure.bench import merge_generation
from ridgeline.predict import predict
from ridgeline.serve.build_engine import DEFAULT_PLAN
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import normalize

WORK = {
    "prompt_len": 12,
    "output_len": 6,
    "length_cv": 0.3,
    "requests": 20,
    "slo_ttft": 30.0,
    "kv_cache_bytes": 1 << 22,
}


@pytest.fixture(autouse=True)
def _unprobed():
    catalog.allow_unprobed()


def experiment(*plan, **work):
    return Experiment(model=spec(), cluster=catalog.cluster("local"), workload=Serve(**{**WORK, **work}),
                      plan=Plan.parse(list(plan)))  # fmt: skip


def test_server_and_client_in_one_go_name_what_the_prediction_names():
    e = experiment(*DEFAULT_PLAN, rate=20.0)
    result = measure_plan(e)
    assert result.status == "ok", result.reason
    m = {k: v.value for k, v in result.metrics.items()}
    assert result.experiment_id == normalize(e).id
    assert (m["errors"], m["requests"], m["slo_share"]) == (0, 20, 1.0)
    assert m["tokens_per_s"] * m["window_s"] == pytest.approx(m["output_tokens_total"])
    assert m["batch_mean"] > 0
    assert m["preemptions"] == 0
    assert all(c.passed for c in result.checks if c.name != "requests were sent on time"), result.checks
    assert [s.tokens for s in result.samples] == [m["output_tokens_total"]]
    kinds = ("ttft", "tpot", "itl", "e2e", "tokens", "requests", "goodput", "slo", "batch", "preemptions")
    shared = {k for k in predict(e).metrics if k.split("_")[0] in kinds}
    assert shared - {"ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "itl_p99_s"} <= set(m), "p99 of a few is withheld"
    foretold = predict(e)
    assert foretold.experiment_id == result.experiment_id
    assert m["kv_cache_tokens"] == foretold.metrics["kv_cache_tokens"].value
    memory = {x.category: x.bytes for x in result.memory}
    assert memory == {x.category: pytest.approx(x.bytes) for x in foretold.memory if x.category in memory}
    assert set(memory) == {"parameters", "kv_cache"}
    merged = merge_generation([result, result])
    assert merged.metrics["ttft_s"].value == m["ttft_s"]


def test_a_server_on_several_ranks_holds_and_sends_what_is_predicted():
    divided = ("tensor_parallel:degree=2", "expert_parallel:degree=2", "pipeline:degree=2")
    e = Experiment(model=spec("mixtral-tiny"), cluster=catalog.cluster("4xlocal"), workload=Serve(**WORK, rate=20.0),
                   plan=Plan.parse([*DEFAULT_PLAN, *divided]))  # fmt: skip
    foretold, result = predict(e), measure_plan(e)
    assert result.status == "ok", result.reason
    m = {k: v.value for k, v in result.metrics.items()}
    assert (m["errors"], m["requests"]) == (0, 20)
    assert m["tokens_per_s_per_device"] == pytest.approx(m["tokens_per_s"] / 4)
    assert m["kv_cache_tokens"] == foretold.metrics["kv_cache_tokens"].value
    memory = {x.category: x.bytes for x in result.memory}
    assert memory == {x.category: pytest.approx(x.bytes) for x in foretold.memory if x.category in memory}
    assert result.traffic
    assert result.traffic == foretold.traffic


@pytest.mark.parametrize("how", [
    pytest.param({"rate": 50.0}, id="open"), pytest.param({"concurrency": 4}, id="closed", marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_baseline_serves_the_same_requests(how):
    e = experiment(**how, max_num_seqs=8)
    require("hf", e)
    result = measure_plan(e, backend="hf")
    assert result.status == "ok", result.reason
    m = {k: v.value for k, v in result.metrics.items()}
    assert (m["requests"], m["errors"]) == (20, 0)
    assert result.environment["backend"] == "hf"
    assert 1 < m["batch_mean"] <= 8
    assert all(c.passed for c in result.checks)
    if "concurrency" in how:
        assert m["batch_mean"] == 4
        assert m["concurrency_mean"] <= 4


def test_what_the_baseline_lacks_is_refused():
    with pytest.raises(Incompatible, match="hf has no"):
        require("hf", experiment(*DEFAULT_PLAN, rate=1.0))
    with pytest.raises(Incompatible, match="deepspeed trains"):
        require("deepspeed", experiment(rate=1.0))


@pytest.mark.nightly
def test_the_warm_up_is_not_in_the_mean_batch():
    """One client: every step but those of the prompts makes one token, and so does each prompt's last."""
    e = experiment(*DEFAULT_PLAN, concurrency=1, requests=5, length_cv=0.3, max_num_batched_tokens=8)
    result, foretold = measure_plan(e), predict(e)
    assert 0.5 < foretold.metrics["batch_mean"].value < 1
    assert result.metrics["batch_mean"].value == pytest.approx(foretold.metrics["batch_mean"].value)


def test_another_engine_is_not_measured_as_if_it_were_ours():
    from ridgeline.measure.ablate import require_local

    require_local(experiment(*DEFAULT_PLAN, engine="ridgeline"))
    with pytest.raises(Incompatible, match="engine 'vllm' is predicted"):
        require_local(experiment(*DEFAULT_PLAN, engine="vllm"))


def test_requests_that_cannot_be_served_are_refused_with_the_servers_reason():
    with pytest.raises(UserError, match="answers 400"):
        measure_plan(experiment(*DEFAULT_PLAN, rate=5.0, prompt_len=100, kv_cache_bytes=20_000))
