"""What the rows change in predictions, and what they leave alone."""

import pytest

from ridgeline import experiments
from ridgeline.graph import prefill_graph
from ridgeline.predict import predict
from ridgeline.techniques.quantization.weight_only import WeightOnly, coded_weights
from ridgeline.techniques.registry import make, registry


def generation(*plan, on="a100"):
    w = {"kind": "generate", "prompt_len": 256, "output_len": 16, "batch_size": 4}
    return experiments.make("llama-2-7b", on, w, list(plan))


def value(name, *plan):
    return predict(generation(*plan)).metrics[name].value


@pytest.mark.parametrize("plan", ["magnitude", "wanda:pattern=4:8", "sparsegpt", "norm_tweaking"])
def test_zeros_and_norms_make_nothing_smaller_or_faster(plan):
    for name in ("peak_bytes", "tpot_s", "ttft_s"):
        assert value(name, plan) == value(name)


@pytest.mark.parametrize("plan", ["smooth_int8", "fptq"])
def test_products_of_integers_run_in_int8_where_the_device_has_it(plan):
    e = generation(plan)
    technique = make(e.plan.calls[0])
    gemms = [o for b in technique.rewrite(prefill_graph(e), e).blocks for o in b.forward if o.kind == "gemm"]
    assert {o.dtype for o in gemms if o.weight_dtype} == {"int8"}
    assert {o.dtype for o in gemms if not o.weight_dtype} == {"bf16"}  # the head
    same_bits = "rtn:bits=8" if plan == "smooth_int8" else "gptq"
    assert value("ttft_s", plan) < value("ttft_s", same_bits)
    assert value("peak_bytes", plan) == value("peak_bytes", same_bits)


def test_weights_kept_aside_weigh():
    e = generation()
    more = value("peak_bytes", "quantease:outliers=0.01") - value("peak_bytes", "quantease")
    assert more == pytest.approx(0.01 * coded_weights(e) * 20, rel=1e-6)
    assert value("tpot_s", "quantease:outliers=0.01") > value("tpot_s", "quantease")


def test_a_search_tries_one_of_those_that_store_alike():
    e = generation()
    tried = {n: c.choices(e) for n, c in registry().items() if issubclass(c, WeightOnly)}
    assert {n for n, found in tried.items() if found} == {"rtn", "gptq"}
