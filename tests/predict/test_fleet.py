"""Fleets: one replica is the single engine's simulation; caches move, replicas flip, come, go and are lost."""

import json
import math
import random

import pytest
from tests.predict.test_scheduler import adds_up
from typer.testing import CliRunner

from ridgeline import catalog, fleets
from ridgeline.cli.base import app
from ridgeline.predict import predict
from ridgeline.predict.fleet.members import Member
from ridgeline.predict.fleet.predict_fleet import capped, model_of, predict_fleet, simulate_fleet
from ridgeline.predict.fleet.replica import FleetRequest
from ridgeline.predict.fleet.transfers import Transfers
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.kv_transfer import kv_transfer
from ridgeline.spec.device import Link
from ridgeline.spec.errors import UserError
from ridgeline.spec.fleet import FleetSpec, Transfer
from ridgeline.spec.workload import Serve

MODEL, ON = "llama2-7b", "a100-80g-sxm"
WORK = {"kind": "serve", "rate": 4.0, "requests": 150, "prompt_len": 700, "output_len": 60, "length_cv": 0.8}


def fleet(*pools, **tables):
    return FleetSpec.model_validate({**tables, "pools": [{"on": ON, "replicas": 1, **p} for p in pools]})


LINK = Link(name="wire", bandwidth=1e9, latency=1e-5)
SPLIT = ({"name": "prompt", "role": "prefill"}, {"name": "token", "role": "decode"})


def outcome(spec, work=WORK, model=MODEL):
    """The simulated fleet, at whose end nothing may be left anywhere."""
    made = fleets.replicas_of(spec, model, work)
    w = Serve.model_validate(work)
    arrivals = requests(w)
    models = [model_of(p, spec, made[p.name], arrivals) for p in spec.pools]
    out = simulate_fleet(spec, models, w, arrivals)
    assert not any(math.isnan(t) for t in (*out.requests.first, *out.requests.finish))
    adds_up(out.requests)
    for m in out.members:
        if m.state == "gone":
            continue
        assert (m.requests, m.promised, m.foreign, m.replica.pending, m.mixed) == (0, 0, 0, 0, False)
        assert m.replica.pool.free == m.model.made.blocks
    return out, models, arrivals


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (None, {}),
        (None, {"engine": "vllm-2023"}),
        (None, {"engine": "ridgeline", "kv_cache_bytes": 1_200_000_000}),  # preempts
        ([], {"engine": "hf"}),  # padded, not continuous
        (None, {"rate": None, "concurrency": 7}),
        (None, {"shared_prefix": 300}),
    ],
)
def test_one_replica_is_the_single_engine(plan, more):
    work = {**WORK, **more}
    spec = fleet({"name": "all", "plan": plan})
    found = predict_fleet(spec, fleets.replicas_of(spec, MODEL, work)).metrics
    alone = predict(fleets.replicas_of(spec, MODEL, work)["all"]).metrics
    if "kv_cache_bytes" in more:
        assert alone["preemptions"].value > 0
    for name in ("ttft_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s", "e2e_p90_s", "requests_per_s", "preemptions",
                 "batch_mean", "busy_share", "dollars_per_million_tokens"):  # fmt: skip
        assert found[name].value == pytest.approx(alone[name].value, rel=1e-9), name


def test_the_router_delays_every_request():
    plain, later = (
        predict_fleet(*_args(fleet({"name": "all"}, fleet={"router_s": s}), WORK)).metrics for s in (0.0, 0.5)
    )
    assert later["ttft_s"].value == pytest.approx(plain["ttft_s"].value + 0.5)
    assert later["tpot_s"].value == pytest.approx(plain["tpot_s"].value)


def test_replicas_in_turn_are_data_parallel():
    spec = fleet({"name": "all", "replicas": 3}, fleet={"policy": "round-robin"})
    out, _, arrivals = outcome(spec)
    third = Serve.model_validate(WORK)
    alone = fleet({"name": "all"})
    made = fleets.replicas_of(alone, MODEL, WORK)
    one = simulate_fleet(alone, [model_of(alone.pools[0], alone, made["all"], arrivals)], third, arrivals[::3])
    assert out.requests.finish[::3] == pytest.approx(one.requests.finish, rel=1e-12)


def test_a_cache_moves_once_and_first_tokens_do_not_wait_for_it():
    out, models, arrivals = outcome(fleet(*SPLIT))
    longer = [r for r in arrivals if r.output > 1]
    assert out.sent.count == len(longer)
    assert out.sent.bytes == sum(r.prompt for r in longer) * models[0].kv_bytes
    m = catalog.model(MODEL)
    assert models[0].kv_bytes == 2 * 2 * m.num_layers * m.num_kv_heads * m.head_dim
    prompt, token = out.members
    assert prompt.replica.out.prompt_tokens == sum(r.prompt for r in arrivals)
    assert token.replica.out.prompt_tokens == 0


@pytest.mark.parametrize(
    ("model", "on", "plan", "copies"),
    [
        ("gpt-oss-20b", "h100-sxm", None, 1),  # layers with a window are sent, too
        ("gemma-3-1b", "h100-sxm", None, 1),
        ("llama2-13b", "3xa100-80g-sxm", ["pipeline:degree=3", "continuous_batching"], 1),  # 14, 13 and 13 layers
        ("deepseek-v2-lite", "4xh100-sxm", None, 4),  # every rank has the whole latent
    ],
)
def test_all_layers_of_a_cache_are_sent(model, on, plan, copies):
    work = {"kind": "serve", "rate": 4.0, "requests": 4, "prompt_len": 700, "output_len": 2}
    spec = fleet(*({**p, "on": on, "plan": plan} for p in SPLIT))
    made = fleets.replicas_of(spec, model, work)
    each = kv_transfer(made["prompt"], 700, LINK, 0.1).nbytes
    assert predict_fleet(spec, made).metrics["kv_transfer_bytes"].value == pytest.approx(4 * copies * each, rel=1e-9)


def test_split_pools_keep_prompts_away_from_tokens():
    burst = {**WORK, "rate": 6.0, "burstiness": 0.05, "prompt_len": 2000, "length_cv": 0.3}
    mixed = predict_fleet(*_args(fleet({"name": "all", "replicas": 2}, fleet={"policy": "shortest-queue"}), burst))
    split = predict_fleet(*_args(fleet(*SPLIT, fleet={"policy": "shortest-queue"}), burst))
    assert split.metrics["tpot_p99_s"].value < 0.5 * mixed.metrics["tpot_p99_s"].value
    assert split.metrics["watts"].value == mixed.metrics["watts"].value


def _args(spec, work):
    return spec, fleets.replicas_of(spec, MODEL, work)


def test_transfer_by_layer_is_a_pipeline():
    """Against layers sent one after the other, each when it is computed and the link is free."""
    spec = fleet(*SPLIT)
    _, models, _ = outcome(spec, {**WORK, "requests": 4})
    rng = random.Random(1)
    for _ in range(50):
        model = models[0]._replace(kv_bytes=1.0, bandwidth=rng.choice([50.0, 400.0, 5000.0]), latency=0.01, layers=8)
        a, b = Member(model, None, 0), Member(model, None, 1)
        way, free, now = Transfers(Transfer(layerwise_from=512)), 0.0, 10.0
        for _ in range(3):
            prompt, begun, ended = rng.randint(512, 4000), now, now + rng.uniform(0.5, 4.0)
            job = FleetRequest(0, prompt, prompt + 1, prompt + 1, since=begun)
            each = prompt / 8 / model.bandwidth + model.latency
            for layer in range(1, 9):
                free = max(free, begun + (ended - begun) * layer / 8) + each
            end = way.send(job, a, b, ended)
            if a.sends_until == pytest.approx(free):  # the link never waited for a layer
                assert end == pytest.approx(free)
            else:
                assert end == pytest.approx(ended + each)
            free, now = a.sends_until, ended
    short = FleetRequest(0, 100, 101, 101, since=0.0)
    a, b = Member(model, None, 0), Member(model, None, 1)
    assert way.send(short, a, b, 5.0) == pytest.approx(5.0 + 100 / model.bandwidth + 0.01)


def test_a_transfer_on_an_idle_link_is_that_of_two_servers():
    spec = fleet(*SPLIT)
    out, _, _ = outcome(spec, {**WORK, "requests": 1, "prompt_len": 2000, "length_cv": 0.0})
    compute = out.members[0].replica.out.busy_s
    e = fleets.replicas_of(spec, MODEL, WORK)["prompt"]
    alone = kv_transfer(e, 2000, e.cluster.device.network, compute)
    assert out.sent.bytes == alone.nbytes
    assert (out.sent.seconds, out.sent.exposed_s) == pytest.approx((alone.seconds, alone.exposed))


def test_replicas_flip_under_a_burst_and_back():
    burst = {**WORK, "rate": 40.0, "prompt_len": 3000, "output_len": 20, "length_cv": 0.0}
    pools = ({"name": "prompt", "role": "prefill"}, {"name": "token", "role": "decode", "replicas": 3})
    flipping, _, _ = outcome(fleet(*pools, flip={}, fleet={"policy": "shortest-queue"}), burst)
    fixed, _, _ = outcome(fleet(*pools, fleet={"policy": "shortest-queue"}), burst)
    assert any(m.role == "decode" and m.replica.out.prompt_tokens for m in flipping.members)
    assert max(flipping.requests.finish) < 0.6 * max(fixed.requests.finish)


def test_a_lost_replica_loses_no_request():
    spot = {"interruptions_per_hour": 600.0, "restart_s": 5.0}
    for pools in (
        [{"name": "all", "replicas": 2, "spot": spot}],
        [{**SPLIT[0], "replicas": 2, "spot": spot}, {**SPLIT[1], "replicas": 2, "spot": spot}],
        [{**SPLIT[0], "spot": spot}, {**SPLIT[1], "spot": {**spot, "notice_s": 2.0}}],
    ):
        for seed in range(3):
            out, _, _ = outcome(fleet(*pools, fleet={"seed": seed}, flip={} if len(pools) > 1 else None))
            assert sum(m.died is not None for m in out.members) > 2
            assert out.recomputed > 0


def test_notice_spares_requests():
    spot = {"interruptions_per_hour": 300.0, "restart_s": 1.0}
    lost = [outcome(fleet({"name": "all", "replicas": 4, "spot": {**spot, "notice_s": s}}))[0] for s in (0.0, 30.0)]
    assert lost[0].recomputed > 0 == lost[1].recomputed


def test_autoscaling_follows_the_load():
    rule = {"target": 4.0, "min": 1, "max": 8, "interval_s": 2.0, "start_s": 3.0, "down_after_s": 10.0}
    work = {**WORK, "requests": 400, "rate": 12.0, "burstiness": 0.3}
    scaled = predict_fleet(*_args(fleet({"name": "all", "autoscale": rule}), work)).metrics
    fixed = predict_fleet(*_args(fleet({"name": "all", "replicas": 8}), work)).metrics
    single = predict_fleet(*_args(fleet({"name": "all"}), work)).metrics
    assert 1 < scaled["all_replicas"].value < 8
    assert scaled["dollars_per_hour"].value < 0.9 * fixed["dollars_per_hour"].value
    assert fixed["ttft_p90_s"].value <= scaled["ttft_p90_s"].value < single["ttft_p90_s"].value


def test_less_power_slows_prompts_not_tokens():
    d = catalog.cluster("8xh100-sxm")
    half = capped(d, 0.5)
    assert half.device.watts == d.device.watts / 2
    assert d.device.peak_flops["bf16"] / half.device.peak_flops["bf16"] == pytest.approx(2 ** (1 / 3))
    work = {**WORK, "rate": 0.5}
    spec = [fleet({"name": "all", "on": "h100-sxm", "power_cap": cap}) for cap in (1.0, 0.5)]
    full, capped_ = (predict_fleet(s, fleets.replicas_of(s, MODEL, work)).metrics for s in spec)
    assert 1.1 < capped_["ttft_p50_s"].value / full["ttft_p50_s"].value < 1.3
    assert capped_["tpot_p50_s"].value / full["tpot_p50_s"].value < 1.1


def test_random_and_least_loaded():
    work = {**WORK, "rate": 30.0, "requests": 300}
    policies = ("random", "least-loaded", "shortest-queue")
    p99 = [
        predict_fleet(*_args(fleet({"name": "all", "replicas": 4}, fleet={"policy": p}), work)).metrics["ttft_p99_s"]
        for p in policies
    ]
    assert max(p99[1].value, p99[2].value) < p99[0].value


def test_requests_too_long_for_every_pool_are_rejected():
    spec = fleet({"name": "all", "replicas": 2})
    result = predict_fleet(spec, fleets.replicas_of(spec, MODEL, {**WORK, "prompt_len": 3000, "length_cv": 1.0}))
    assert any("rejected" in note for note in result.notes)
    small = fleet({"name": "all", "kv_cache_bytes": 200_000_000, "engine": "ridgeline"})
    none = predict_fleet(small, fleets.replicas_of(small, MODEL, {**WORK, "length_cv": 0.0}))
    assert none.status == "infeasible"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "pools"),
        ("[[pools]]\nname = 'a'\nrole = 'prefill'", "decode pool"),
        ("[[pools]]\nname = 'a'\nrole = 'decoding'", "decode"),
        ("[[pools]]\nname = 'a'\nreplica = 2", "replicas"),
        ("[[pools]]\nname = 'a'\n[[pools]]\nname = 'a'", "same name"),
        ("[[pools]]\nname = 'a'\nautoscale = {target = 1.0, min = 5, max = 2}", "min = 5"),
        ("[[pools]]\nname = 'a b'", "name"),
        ("x = [", "TOML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, said):
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        fleets.load(tmp_path / "fleet.toml")


def test_a_replica_is_one_engine():
    spec = fleet({"name": "all", "on": "4xa100-80g-sxm", "plan": ["tensor_parallel:degree=2"]})
    with pytest.raises(UserError, match="2 of the 4 devices"):
        predict_fleet(spec, fleets.replicas_of(spec, MODEL, WORK))
    unsized = fleet({"name": "all", "replicas": None})
    with pytest.raises(UserError, match="no number of replicas"):
        fleets.require_sizes(unsized)


def test_a_running_fleet_is_predicted_from_its_own_file(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        """
[fleet]
port = 8080
policy = "least-loaded"
wait_s = 5.0
[tenants.a]
key = "x"
[[servers]]
checkpoint = "somewhere"
replicas = 2
options = ["--max-num-seqs", "64", "--with", "-chunked_prefill", "--with=kv_quant:bits=8", "--kv-cache=1GiB",
           "--served-model-name", "m"]
[[servers]]
checkpoint = "somewhere"
role = "mixed"
"""
    )
    spec = fleets.load(file)
    first, second = spec.pools
    assert (first.on, first.replicas, first.engine, first.max_num_seqs, first.kv_cache_bytes) == (
        "local", 2, "ridgeline", 64, 2**30,
    )  # fmt: skip
    assert "kv_quant:bits=8" in first.plan
    assert set(second.plan) - set(first.plan) == {"chunked_prefill"}
    assert (spec.fleet.policy, second.replicas) == ("least-loaded", 1)
    file.write_text("".join(f"[[servers]]\ncheckpoint = 'x'\nrole = '{r}'\n" for r in ("prefill", "decode")))
    assert [p.role for p in fleets.load(file).pools] == ["prefill", "decode"]
    assert fleets.load(file).flip is not None
    file.write_text("[[servers]]\ncheckpoint = 'x'\noptions = ['--max-num-seqs', 'many']")
    with pytest.raises(UserError, match="max-num-seqs"):
        fleets.load(file)


def test_a_fleet_file_is_written_and_read_again(tmp_path):
    spec = fleet(*SPLIT, flip={}, transfer={"bandwidth": 1e9}, fleet={"policy": "shortest-queue", "seed": 3})
    assert fleets.load(fleets.write(spec, tmp_path / "a.toml")) == spec


def test_the_command_line(tmp_path):
    file = fleets.write(fleet({"name": "all", "replicas": None}), tmp_path / "fleet.toml")
    work = ["--task", "serve", "--fleet", str(file), "--rate", "30", "--requests", "200", "--prompt-len", "700"]
    run = CliRunner()
    sized = run.invoke(app, ["plan", MODEL, *work, "--slo", "ttft_p99_s=0.5", "--out", str(tmp_path), "--json"])
    assert sized.exit_code == 0
    (found,) = json.loads(sized.stdout)
    assert found["replicas"]["all"] > 1
    predicted = run.invoke(app, ["predict", MODEL, *work, "--json"])
    assert predicted.exit_code == 0
    assert json.loads(predicted.stdout)["metrics"]["ttft_p99_s"]["value"] == found["metrics"]["ttft_p99_s"]
    none = run.invoke(app, ["plan", MODEL, *work, "--slo", "tpot_p50_s=1us", "--out", str(tmp_path)])
    assert none.exit_code == 1
    for options, said in (
        (["--on", ON], "--on does not go with --fleet"),
        (["--task", "generate"], "a fleet serves"),
        (["--with", "fp8"], "--with does not go"),
    ):
        error = run.invoke(app, ["predict", MODEL, *work, *options]).exception
        assert isinstance(error, UserError)
        assert said in str(error)
