"""The probe measures every kind of operator that a training graph holds, and predictions then rest on it."""

import json
import math

import pytest
import torch

from ridgeline import catalog, experiments
from ridgeline.graph import optimizer_ops, training_graph
from ridgeline.jobs.job import LaunchJob, RankContext
from ridgeline.jobs.worker import run_rank
from ridgeline.measure.environment import cores
from ridgeline.measure.probing import probe as probing
from ridgeline.measure.probing import probe_serving, probe_timer, probe_worker
from ridgeline.measure.probing.probe import DECODE_BITS, decode_experiment, decode_latency, probe
from ridgeline.measure.probing.probe_timer import affine
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.predict.operators.kernel import find_rate
from ridgeline.techniques.registry import check


def in_this_process(job, watch, timeout):
    """A job of one rank, without the processes that ``ridgeline probe --sweep`` starts in its own test."""
    sent = LaunchJob.from_json(job.to_json())
    return json.loads(json.dumps(run_rank(sent, RankContext(torch.device("cpu"), 0, 1, watch))))


@pytest.fixture(scope="module")
def profile(_homes, once):
    """All measurements once. No figure has to be right here: memory that caches hold, and small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_HOME", str(next(_homes)))
        patch.setattr(probing, "run_job", in_this_process)
        for module, name in ((probe_timer, "CACHE_BYTES"), (probe_worker, "CACHE_BYTES"), (probe_serving, "_CACHED")):
            patch.setattr(module, name, 2**20)
        for name in ("WIDE_REFERENCE", "DECODE_REFERENCE"):
            narrow = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 256}
            patch.setattr(probing, name, getattr(probing, name).model_copy(update=narrow))
        for module in (probing, probe_serving):
            patch.setattr(module, "STEP_DEPTHS", (3, 4, 5))
        yield once("profile", probed)


def probed():
    device, file = probe(max_ranks=1, quick=True)
    assert catalog.local_device() == device
    assert file.is_file()
    return device


PLANS = [[], ["flash_attention"], ["recompute"], ["mixed_precision"], ["lora", "rtn:bits=8"], ["lora", "rtn:bits=4"]]


@pytest.mark.parametrize("plan", PLANS, ids=["+".join(p) or "none" for p in PLANS])
def test_every_operator_has_a_measured_rate(profile, monkeypatch, plan):
    monkeypatch.setattr(catalog, "local_device", lambda: profile)
    e = experiments.make("llama-tiny", "local", {"kind": "pretrain", "seq_len": 64, "batch_size": 2}, plan)
    g = rewritten(training_graph(e), e, check(e))
    ops = [o for b in g.blocks for o in (*b.forward, *b.backward)] + optimizer_ops(g)
    missing = {(o.kind, o.direction, o.dtype) for o in ops if find_rate(profile, o.kind, o.direction, o.dtype) is None}
    assert not missing
    assert predict(e).metrics["step_time_s"].source == "measured profile"


def test_rates_are_plausible(profile):
    assert all(r.latency > 0 and (r.flop_rate > 0) != (r.byte_rate > 0) for r in profile.rates.values())
    assert 1e7 < profile.peak_flops["fp32"] < 1e15
    assert profile.host_latency["1"] >= 0


def test_serving_is_probed_on_the_real_engine_and_server(profile):
    seconds = {k: v for k, v in profile.host_latency.items() if k.startswith("serve")}
    known = {f"serve.{k}" for k in ("iteration", "sequence", "token", "reply", "request", "admission")}
    assert set(seconds) == known | ({"serve.apart"} if cores() > 1 else set())
    sizes = [line[0] for line in profile.step_latency]
    assert sizes == sorted(sizes)
    assert all(math.isfinite(seconds) for line in profile.step_latency for seconds in line[1:])
    assert profile.ranks["serve"].keys() == {k for k in profile.rates if "pool" not in k and "copy_ring" not in k}
    assert all(0 <= v < math.inf for v in seconds.values())
    pools = {k: r for k, r in profile.rates.items() if k.startswith("attention_pool")}
    assert len(pools) == 4


def test_generation_is_predicted_from_operators_without_autograd(profile, monkeypatch):
    monkeypatch.setattr(catalog, "local_device", lambda: profile)
    (few, least), (many, most) = profile.decode_latency
    generating = profile.generating((few + many) / 2)
    assert generating.extra_latency == pytest.approx((least + most) / 2)
    norm = find_rate(generating, "norm", "forward", "fp32")
    assert norm == profile.rates["norm.inference.fp32"] != profile.rates["norm.forward.fp32"]
    work = {"kind": "generate", "prompt_len": 8, "output_len": 4}
    dear = profile.rates | {"norm.inference.fp32": norm.model_copy(update={"latency": 1.0})}
    slow = profile.model_copy(update={"rates": dear})
    e = experiments.make("llama-tiny", "local", work, [])
    before = predict(e).metrics["tpot_s"].value
    monkeypatch.setattr(catalog, "local_device", lambda: slow)
    norms = 2 * e.model.num_layers + 1
    after = predict(experiments.make("llama-tiny", "local", work, [])).metrics["tpot_s"].value
    assert after == pytest.approx(before + norms * (1.0 - norm.latency))


def test_what_decode_steps_add_is_found(profile):
    """Of steps that take what predictions of their operators say and a microsecond for each."""
    bare = profile.model_copy(update={"decode_latency": []})
    found, want = {}, []
    for bits in DECODE_BITS:
        e = decode_experiment(bare, bits)
        rows = [r for r in predict(e).breakdown if r.phase == "decode"]
        steps = e.workload.output_len - 1
        others = sum(r.seconds for r in rows if r.kind != "gemm") / steps
        found[str(bits)] = others + 1e-6 * sum(r.count for r in rows) / steps
        want.append([sum(p.numel for p in e.model.block_parameters(0)) * bits / 8, pytest.approx(1e-6)])
    assert decode_latency(bare, found) == want
    assert decode_latency(bare, dict.fromkeys(found, 0.0)) == [[size, 0.0] for size, _ in want]


@pytest.mark.parametrize(("tiny", "latency"), [(5e-6, 2e-5), (4e-5, 4e-5)])
def test_products_that_wait_for_weights_take_a_start_and_a_rate(tiny, latency):
    """Two sizes separate them; a start is at least what the smallest call takes."""
    fit = affine(tiny, (1e6, 2e-5 + 1e6 / 2e10), (4e6, 2e-5 + 4e6 / 2e10))
    assert fit["latency"] == pytest.approx(latency)
    assert fit["latency"] + 4e6 / fit["byte_rate"] == pytest.approx(2e-5 + 4e6 / 2e10)
    noisy = affine(tiny, (1e6, 3e-4), (4e6, 2e-4))  # the machine was slower meanwhile: a rate near that of the larger
    assert 4e6 / 2e-4 <= noisy["byte_rate"] <= 2 * 4e6 / 2e-4
    assert tiny <= noisy["latency"] <= 1.5e-4
