"""Serving end to end: from an experiment to a Result, its metrics, traces and refusals."""

import gzip
import json
import math
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.predict.serving.arrivals import read_trace, requests
from ridgeline.predict.serving.simulate import percentile, weighted_percentiles
from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import Serve


def serve(model="llama2-7b", on="a100", plan=(), **workload):
    return predict(
        experiments.make(model, on, {"kind": "serve", "engine": "vllm", "requests": 200, **workload}, list(plan))
    )


def values(result):
    return {k: m.value for k, m in result.metrics.items()}


def test_metrics_are_consistent():
    r = serve(rate=4.0, slo_ttft=10.0, slo_tpot=1.0)
    m = values(r)
    assert (r.status, r.source) == ("ok", "predicted")
    for name in ("ttft", "tpot", "e2e", "itl"):
        assert 0 < m[f"{name}_p50_s"] <= m[f"{name}_p90_s"] <= m[f"{name}_p99_s"]
    assert m["e2e_s"] == pytest.approx(m["ttft_s"] + 127 * m["tpot_s"], rel=1e-6)
    assert m["tokens_per_s"] == pytest.approx(128 * m["requests_per_s"])
    assert m["goodput_per_s"] == m["requests_per_s"]
    assert m["slo_share"] == 1.0
    assert 0 < m["busy_share"] <= 1
    assert r.breakdown
    assert all(math.isfinite(v) for v in m.values())


def test_a_limit_on_latency_lowers_goodput():
    free, tight = values(serve(rate=4.0)), values(serve(rate=4.0, slo_tpot=values(serve(rate=4.0))["tpot_p50_s"]))
    assert 0.3 < tight["slo_share"] < 0.7
    assert tight["goodput_per_s"] < free["goodput_per_s"]


def test_replicas_share_the_arrivals():
    one, two = values(serve(rate=2.0, requests=400)), values(serve(on="2xa100", rate=4.0, requests=800))
    assert two["requests_per_s"] == pytest.approx(2 * one["requests_per_s"], rel=0.1)
    assert two["tpot_s"] == pytest.approx(one["tpot_s"], rel=0.1)


def test_same_seed_same_answer():
    first, again, other = (values(serve(rate=4.0, length_cv=0.5, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_what_does_not_fit_is_said():
    r = serve("llama2-70b", "rtx4090")
    assert r.status == "infeasible"
    assert "138" in r.reason
    assert "tensor_parallel" in r.reason
    r = serve("llama2-7b", "8xrtx4090", ["tensor_parallel:degree=8"], prompt_len=4000, output_len=90)
    assert r.status == "ok"
    r = serve("llama2-70b", "rtx4090", engine="ridgeline")
    assert r.status == "infeasible"
    assert "138" in r.reason
    with pytest.raises(UserError, match="room for 1 blocks"):
        serve(engine="ridgeline", kv_cache_bytes=9 << 20)


def test_an_8_bit_cache_holds_twice_the_tokens():
    plain, small = values(serve()), values(serve(plan=["kv_quant"]))
    assert small["kv_cache_tokens"] == pytest.approx(2 * plain["kv_cache_tokens"], rel=0.001)
    assert small["tpot_s"] < plain["tpot_s"]


def test_smaller_weights_decode_faster():
    base, fp8, fp4 = (values(serve("llama3.1-70b", "8xh100", ["tensor_parallel:degree=8", *p], concurrency=4))
                      for p in ([], ["fp8"], ["mxfp4:layers=all"]))  # fmt: skip
    assert base["tpot_s"] > fp8["tpot_s"] > fp4["tpot_s"]
    assert base["kv_cache_tokens"] < fp8["kv_cache_tokens"] < fp4["kv_cache_tokens"]


# ---- arrivals ----------------------------------------------------------------------------------------------------


def test_arrivals_have_the_asked_rate_and_burstiness():
    for burstiness in (0.5, 1.0, 4.0):
        asked = requests(Serve(rate=10.0, requests=5000, burstiness=burstiness, length_cv=0.5))
        gaps = [b.arrival - a.arrival for a, b in pairwise(asked)]
        mean = sum(gaps) / len(gaps)
        cv = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean
        assert mean == pytest.approx(0.1, rel=0.06)
        assert cv == pytest.approx(burstiness**-0.5, rel=0.1)
        assert sum(r.prompt for r in asked) / 5000 == pytest.approx(512, rel=0.05)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,7,5\n"
)
MOONCAKE = '{"timestamp": 3000, "input_length": 7, "output_length": 5, "hash_ids": [1]}\n' \
           '{"timestamp": 1000, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n'  # fmt: skip


def test_traces(tmp_path):
    azure, mooncake = tmp_path / "conv.csv.gz", tmp_path / "conv.jsonl"
    azure.write_bytes(gzip.compress(AZURE.encode()))
    mooncake.write_text(MOONCAKE)
    assert read_trace(azure) == [(0.0, 4808, 10), (pytest.approx(1.0), 7, 5)]
    assert read_trace(mooncake) == [(0.0, 9, 2), (2.0, 7, 5)]
    assert len(read_trace(azure, limit=1)) == 1
    r = serve(trace=str(mooncake), requests=None)
    assert r.metrics["requests_per_s"].value == pytest.approx(1.0, rel=0.2)
    stretched = requests(Serve(trace=str(mooncake), rate=0.1))
    assert stretched[-1].arrival == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "x,y\n1,2\n", "holds no request|not a request"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "not a request: .*yesterday"),
        ("a.jsonl", '{"timestamp": 1}\n', "input_length"),
        ("a.jsonl", "", "holds no request"),
    ],
)
def test_bad_traces(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        serve(trace=str(tmp_path / name))
    with pytest.raises(UserError, match="cannot read trace"):
        serve(trace=str(tmp_path / "none.csv"))


def test_contradictions_are_refused():
    with pytest.raises(UserError, match="closes the loop"):
        serve(rate=1.0, concurrency=3)
    with pytest.raises(UserError, match="unknown engine 'vlm'"):
        serve(engine="vlm")


def test_percentiles():
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert weighted_percentiles([(1.0, 90), (5.0, 10)], (0.5, 0.9, 0.99)) == [1.0, 1.0, 5.0]


# ---- speed -------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_requests_a_minute():
    """The stated least speed, with a wide margin for a busy machine."""
    start = time.process_time()
    serve(rate=3.0, requests=20_000, length_cv=0.7)
    assert time.process_time() - start < 12.0


def test_recorded_traces():
    folder = os.environ.get("RIDGELINE_DATA")
    traces = sorted(Path(folder).rglob("*.gz")) if folder else []
    if not traces:
        pytest.skip("RIDGELINE_DATA names no directory with traces")
    for trace in traces:
        r = serve("llama3.1-70b", "8xh100", ["fp8", "tensor_parallel:degree=8"], trace=str(trace), requests=3000)
        assert r.status == "ok"
        json.loads(r.to_json())


@pytest.mark.parametrize(("model", "on", "plan", "says"), [
    ("deepseek-v3", "16xh200", ["tensor_parallel:degree=16"], "in fp8, and predicted in bf16: --with fp8 predicts"),
    ("deepseek-v3", "8xh200", ["tensor_parallel:degree=8"], "in fp8, and predicted in bf16: --with fp8 predicts"),
    ("gpt-oss-20b", "h100", [], "published in mxfp4, and predicted in bf16: --with mxfp4"),
    ("deepseek-v3", "16xh200", ["tensor_parallel:degree=16", "fp8"], ""),
    ("gpt-oss-20b", "h100", ["fp8"], ""), ("llama3.1-8b", "h100", [], ""),
])  # fmt: skip
def test_the_format_that_weights_are_published_in(model, on, plan, says):
    """Also where 16 bits do not fit."""
    notes = predict(experiments.make(model, on, {"kind": "serve", "requests": 4}, plan)).notes
    found = [n for n in notes if "published in" in n]
    assert len(found) == bool(says)
    assert all(says in n for n in found)
