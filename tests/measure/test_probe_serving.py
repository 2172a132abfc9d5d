"""From what the probe measures of serving to what the predictor adds: known costs are found again."""

import json

import pytest

from ridgeline.jobs.launch import JobFailed
from ridgeline.measure.probing import probe as probing
from ridgeline.measure.probing.probe import (
    DECODE_REFERENCE,
    NARROW_STEPS,
    SERVED,
    STEP_DEPTHS,
    deep,
    narrow,
    serving_experiment,
    with_serving,
)  # fmt: skip
from ridgeline.predict import predict
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.engine_costs import find_engine
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.serving.simulate import surface_of
from ridgeline.spec.device import PROMPT_ROWS, STEP_ROWS, Cluster, Device, Rate
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import check, normalize

KINDS = ("norm", "rope", "residual", "activation", "embedding")
RATES = {f"{kind}.fp32": Rate(latency=5e-6, byte_rate=1e10) for kind in KINDS}
RATES |= {"gemm.forward.fp32": Rate(latency=6e-6, flop_rate=3e10)}
RATES |= {"attention.forward.fp32": Rate(latency=8e-6, flop_rate=2e10)}
POOLS = {"": {"latency": 18e-6, "byte_rate": 6e9}, "int8": {"latency": 50e-6, "byte_rate": 1.4e9}}
TRUE = {"serve": 9e-6, "layer": 12e-6, "serve.sequence": 15e-6, "serve.iteration": 2e-4, "serve.token": 1e-4,
        "serve.reply": 3e-4, "serve.request": 5e-3, "serve.admission": 1.5e-3}  # fmt: skip


def bare():
    return Device(name="local", kind="cpu", peak_flops={"fp32": 5e10}, memory_bytes=8e9, memory_bandwidth=1e10,
                  rates=RATES, host_latency={"1": 3e-5, "decode": 1e-5})  # fmt: skip


def step(model, n, prompt=False):
    """Seconds of a decode step of ``n`` sequences, or of a prompt of ``n`` tokens, on a machine with the true costs."""
    pools = {f"attention_pool.{k}".rstrip("."): Rate(**v) for k, v in POOLS.items()}
    d = bare().model_copy(update={"rates": {**RATES, **pools}, "host_latency": {}})
    e = normalize(serving_experiment(model, n, d))
    surface = Iterations(e, check(e), e.cluster, find_engine("ridgeline", d), (8, 64))
    ops = sum(x.repeat * sum(o.kind != "attention" for o in x.forward) for x in surface.graph(1, 1, 1).blocks)
    own = TRUE["serve.iteration"] + ops * TRUE["serve"]
    if prompt:
        return surface.body(n) + surface.prompt_attention(n, 0) + surface.head(1) + own + TRUE["serve.sequence"]
    a, b = surface.decode(n)
    return a + b * n * 32 + own + n * (TRUE["serve.sequence"] + model.num_layers * TRUE["layer"])


def found():
    steps = {f"{layers},{n}": step(narrow(layers), n) for layers, n in NARROW_STEPS}
    large = {f"{layers},{n}": step(deep(layers), n, n in PROMPT_ROWS) for layers in STEP_DEPTHS for n in STEP_ROWS}
    one, sixteen = step(narrow(2), 1), step(narrow(2), 16)
    both, reply = TRUE["serve.token"] + TRUE["serve.admission"], TRUE["serve.reply"]
    token = TRUE["serve.token"] + reply
    http = {"clients": 16, "alone_s": one + TRUE["serve.request"] + both + reply,
            "crowd_s": (sixteen + reply) / 16 + both, "token_s": sixteen + 15 * TRUE["serve.token"] + token,
            "lone_token_s": one + token}  # fmt: skip
    return {"steps": steps, "deep": large, "attention": POOLS, "http": http, "served": steps}


def test_known_costs_are_found_again():
    d = with_serving(bare(), found())
    for name, value in TRUE.items():
        if name.startswith("serve."):
            assert d.host_latency[name] == pytest.approx(value, rel=0.02), name
    for _, *seconds in d.step_latency:
        assert seconds == pytest.approx([TRUE["serve"]] * len(STEP_ROWS), rel=0.02)
    assert d.host_latency["1"] == 3e-5
    assert d.rates["attention_pool"].latency == pytest.approx(18e-6 + TRUE["layer"], rel=0.02)
    assert d.rates["attention_pool.int8"].latency == pytest.approx(50e-6 + TRUE["layer"], rel=0.02)


def test_a_server_beside_the_engines_process_hides_behind_its_steps():
    """Its own seconds are found where they are longer than a narrow model's steps, and predicted as a lower bound."""
    costs, true = found(), {"serve.token": 4e-4, "serve.reply": 2e-3, "serve.request": 5e-3, "serve.admission": 1.5e-3}
    lone, crowd = true["serve.reply"] + true["serve.token"], true["serve.reply"] + 16 * true["serve.token"]
    costs["http"] = {"clients": 16, "apart": 1.0, "alone_s": lone + true["serve.request"] + true["serve.admission"],
                     "crowd_s": crowd / 16 + true["serve.admission"], "token_s": crowd,
                     "lone_token_s": lone}  # fmt: skip
    d = with_serving(bare(), costs)
    for name, value in true.items():
        assert d.host_latency[name] == pytest.approx(value, rel=0.02), name
    e = serving_experiment(narrow(2), 1, d, requests=4, output_len=20)
    assert predict(e).metrics["tpot_p50_s"].value == pytest.approx(lone, rel=0.02)
    large = serving_experiment(deep(20), 1, d, requests=4, output_len=20)
    alone = step(deep(20), 1)
    assert alone > 1.5 * lone
    assert predict(large).metrics["tpot_p50_s"].value == pytest.approx(alone, rel=0.05)


def test_operators_are_slower_where_weights_outgrow_the_caches_and_faster_where_these_hold_them():
    costs = found()
    costs["deep"]["20,1"] += 4e-3
    costs["deep"]["6,8"] -= 1e-3
    d = with_serving(bare(), costs)
    (least, *_), (few, *_), (some, *_), (many, *_) = d.step_latency
    true, cold, warm = TRUE["serve"], TRUE["serve"] + 4e-3 / 283, TRUE["serve"] - 1e-3 / 87
    sizes = (0, least, few, some, (some + many) / 2, many, 9 * many)
    expected = [true, true, true, true, (true + cold) / 2, cold, cold]
    assert [d.serving(size).in_step(1) for size in sizes] == pytest.approx(expected, rel=0.02)
    expected = [true, (true + warm) / 2, warm, (true + warm) / 2, true, true]
    assert [d.serving(few).in_step(rows) for rows in (1, 4.5, 8, 20, 32, 99)] == pytest.approx(expected, rel=0.02)
    assert bare().serving(1e9).in_step(4) == 0, "nothing was measured"


def test_prompts_have_costs_of_their_own():
    costs = found()
    costs["deep"]["20,512"] += 0.283
    d = with_serving(bare(), costs).serving(4.0 * deep(20).num_parameters)
    expected = [TRUE["serve"], TRUE["serve"] + 0.5e-3, TRUE["serve"] + 1e-3]
    assert [d.in_step(rows) for rows in (64, 288, 512)] == pytest.approx(expected, rel=0.02)

    def metrics(machine, prompt):
        e = serving_experiment(deep(20), 1, machine, requests=4, prompt_len=prompt, output_len=8)
        return predict(e).metrics

    plain = with_serving(bare(), found())
    slow = with_serving(bare(), costs)
    added = [metrics(slow, n)["ttft_p50_s"].value - metrics(plain, n)["ttft_p50_s"].value for n in (64, 512)]
    assert added == pytest.approx([0, 0.283], rel=0.02, abs=1e-4)
    assert metrics(slow, 512)["tpot_p50_s"].value == pytest.approx(metrics(plain, 512)["tpot_p50_s"].value, rel=0.01)


def test_a_profile_of_decode_steps_alone_is_still_read():
    d = with_serving(bare(), found())
    d = d.model_copy(update={"step_latency": [line[:4] for line in d.step_latency]})
    assert d.serving(1e9).in_step(512) == pytest.approx(TRUE["serve"], rel=0.02)


def test_layers_in_one_kernel_have_costs_of_their_own():
    costs = found()
    costs["kernel"] = {k: v - 2e-3 for k, v in costs["deep"].items()}
    d = with_serving(bare(), costs)

    def tpot(machine, *plan):
        e = serving_experiment(DECODE_REFERENCE, 8, machine, requests=16, prompt_len=100, output_len=50)
        return predict(e.model_copy(update={"plan": Plan.parse([*SERVED, *plan])})).metrics["tpot_s"].value

    plain = with_serving(bare(), found())
    assert tpot(d) == pytest.approx(tpot(plain) - 2e-3, rel=0.15)
    assert tpot(d, "kv_quant:dtype=int8") < tpot(plain, "kv_quant:dtype=int8")
    for other in ("dynamic_memory", "multi_adapter"):  # layers as the kernel does not have them
        assert tpot(d, other) == pytest.approx(tpot(plain, other))


def test_noise_gives_no_negative_seconds():
    costs = found()
    costs["http"] = {"clients": 16, "alone_s": 0.0, "crowd_s": 0.0, "token_s": 0.0, "lone_token_s": 0.0}
    costs["steps"] = dict.fromkeys(costs["steps"], costs["steps"]["2,1"])
    d = with_serving(bare(), costs)
    assert all(v >= 0 for k, v in d.host_latency.items() if k.startswith("serve."))
    assert all(r.latency >= 0 for r in d.rates.values())


@pytest.fixture(scope="module")
def machine():
    return with_serving(bare(), found())


def test_the_engine_on_a_measured_machine_costs_what_was_measured(machine):
    engine = find_engine("", machine)
    assert (engine.name, engine.source) == ("ridgeline", "measured on this machine")
    assert engine.sequence_s == pytest.approx(TRUE["serve.sequence"] + TRUE["serve.token"], rel=0.02)
    assert engine.request_s == pytest.approx(TRUE["serve.request"], rel=0.02)


@pytest.mark.parametrize(("ranks", "apart"), [(1, True), (2, False)])
def test_the_server_of_a_divided_model_is_in_the_engines_process(ranks, apart, machine):
    """As ``bench`` runs them."""
    device = machine.model_copy(update={"host_latency": {**machine.host_latency, "serve.apart": 1.0}})
    e = serving_experiment(narrow(2), 4, device, requests=8)
    divided = [f"tensor_parallel:degree={ranks}"] if ranks > 1 else []
    plan, cluster = [*SERVED, *divided], Cluster(device=device, devices_per_node=ranks)
    e = normalize(e.model_copy(update={"plan": Plan.parse(plan), "cluster": cluster}))
    engine = surface_of(e, check(e), requests(e.workload)).engine
    assert (engine.token_s > 0, engine.reply_s > 0) == (apart, apart)
    assert engine.iteration_s == pytest.approx(TRUE["serve.iteration"] + (not apart) * TRUE["serve.reply"], rel=0.02)
    assert engine.sequence_s == pytest.approx(TRUE["serve.sequence"] + (not apart) * TRUE["serve.token"], rel=0.02)


def test_one_client_waits_for_what_is_known(machine):
    """A lone request with one token: HTTP, its reading, and one iteration."""
    e = serving_experiment(narrow(2), 1, machine, requests=5, prompt_len=1, output_len=2)
    m = {k: v.value for k, v in predict(e).metrics.items()}
    want = step(narrow(2), 1) + TRUE["serve.token"] + TRUE["serve.reply"]
    assert m["tpot_s"] == pytest.approx(want, rel=0.02)
    assert m["ttft_s"] == pytest.approx(want + TRUE["serve.request"] + TRUE["serve.admission"], rel=0.02)


def test_an_operator_in_codes_reads_less_and_costs_more(machine):
    def tpot(*plan):
        e = serving_experiment(DECODE_REFERENCE, 8, machine, requests=16, prompt_len=100, output_len=50)
        return predict(e.model_copy(update={"plan": Plan.parse([*SERVED, *plan])})).metrics["tpot_s"].value

    assert tpot("kv_quant:dtype=int8") > tpot()


def test_an_interrupted_probe_goes_on(monkeypatch, tmp_path):
    """The part that was done is taken, the interrupted one measured; afterwards nothing is kept."""
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "cores", lambda: 2)
    monkeypatch.setattr(probing, "device_of", lambda found: bare().model_copy(update={"title": json.dumps(found)}))
    asked = []

    def run_job(job, watch, timeout):
        asked.append(job.ranks)
        if asked == [1, 2]:
            raise KeyboardInterrupt
        return {"kind": "cpu", "ranks": job.ranks, "rate": 1e-6}

    monkeypatch.setattr(probing, "run_job", run_job)
    with pytest.raises(KeyboardInterrupt):
        probing.probe(inference=False)
    device, _ = probing.probe(inference=False)
    assert asked == [1, 2, 2]
    assert json.loads(device.title) == {str(n): {"kind": "cpu", "ranks": n, "rate": 1e-6} for n in (1, 2)}
    probing.probe(inference=False)
    assert asked == [1, 2, 2, 1, 2]
    probing.probe(max_ranks=1, quick=True, inference=False)
    assert asked[5:] == [1]


def test_a_probe_that_fails_says_why(monkeypatch, tmp_path):
    def run_job(*job, **more):
        raise JobFailed("error", "rank 0 ran out of disk", "its log")

    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "run_job", run_job)
    with pytest.raises(UserError, match="the probe with 1 processes failed: rank 0 ran out of disk"):
        probing.probe(max_ranks=1)
    assert not list(tmp_path.rglob("*.json"))


def test_parts_of_another_device_or_of_no_device_are_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "cores", lambda: 2)
    asked = []

    def run_job(job, watch, timeout):
        asked.append(job.ranks)
        if job.ranks == 2:
            raise KeyboardInterrupt
        return {"kind": "gpu"}

    monkeypatch.setattr(probing, "run_job", run_job)
    for visible in ("0", "", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(KeyboardInterrupt):
            probing.probe()
    assert asked == [1, 2, 1, 2, 2]
    asked.clear()

    def fails(found):
        raise ValueError("noise")

    monkeypatch.setattr(probing, "device_of", fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="noise"):
            probing.probe(max_ranks=1, quick=True)
    assert asked == [1, 1]
