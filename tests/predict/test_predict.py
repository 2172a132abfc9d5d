"""What the predictor says: identities it must keep, and orders that every plan must obey."""

import math
from itertools import pairwise

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict, predict_trace
from ridgeline.predict.quick import quick
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.registry import resolve

MODEL = "llama2-7b"


def make(plan=(), on="8xa100", model=MODEL, **workload):
    return experiments.make(model, on, {"kind": "pretrain", "seq_len": 2048, "batch_size": 32, **workload}, list(plan))


def memory(r):
    return {m.category: m.bytes for m in r.memory}


def seconds(r, **wanted):
    return sum(row.seconds for row in r.breakdown if all(getattr(row, k) == v for k, v in wanted.items()))


def test_the_question_of_the_readme_is_answered():
    workload = {"kind": "pretrain", "seq_len": 4096, "batch_size": 8}
    e = experiments.make("llama2-70b", "8xa800-80g", workload, ["zero:stage=3", "recompute"])
    r = predict(e)
    assert r.status == "infeasible"
    largest = max(r.memory, key=lambda m: m.bytes)
    assert largest.category == "optimizer"
    assert "largest category: optimizer" in r.reason
    # Adam's two fp32 moments of 69.0 B parameters over 8 ranks.
    assert largest.bytes == pytest.approx(8 * 68_976_648_192 / 8)
    assert memory(predict(make(["zero:stage=3"], "4x8xa100")))["optimizer"] * 32 == pytest.approx(8 * 6_738_415_616)


def test_every_model_and_task_is_predicted():
    for name in catalog.models():
        m = catalog.model(name)
        length = min(512, m.max_positions)
        for task in ("pretrain", "finetune", "generate"):
            sizes = {"prompt_len": length - 8, "output_len": 8} if task == "generate" else {"seq_len": length}
            if task == "generate" and not m.causal:
                with pytest.raises(Incompatible, match="encoder: it cannot generate"):
                    experiments.make(name, "8xa100", {"kind": task, **sizes}, [])
                continue
            r = predict(experiments.make(name, "8xa100", {"kind": task, **sizes}, []))
            wrong = [k for k, v in r.metrics.items() if not (math.isfinite(v.value) and v.value >= 0)]
            assert not wrong, f"{name} {task}: {wrong}"
            assert r.metrics["tokens_per_s"].value > 0
            assert r.breakdown
            assert all(math.isfinite(row.seconds) and row.seconds >= 0 for row in r.breakdown)
            assert r.peak_bytes == pytest.approx(r.metrics["peak_bytes"].value)
            assert memory(r)["parameters"] >= m.num_parameters * 2


def test_zero_memory():
    plain = memory(predict(make()))
    stages = {s: memory(predict(make([f"zero:stage={s}"]))) for s in (1, 2, 3)}
    for got in stages.values():
        assert got["optimizer"] == pytest.approx(plain["optimizer"] / 8)
    assert plain["optimizer"] == 8 * catalog.model(MODEL).num_parameters

    def total(plan, **workload):
        return predict(make(plan, **workload)).peak_bytes

    for workload in ({}, {"micro_batch_size": 1}):  # without and with gradient accumulation
        one, two, three = (total([f"zero:stage={s}"], **workload) for s in (1, 2, 3))
        assert three < two <= one < total([], **workload)


def test_zero_communication():
    """Parameters are gathered once (stages 1, 2) or twice (3), gradients scattered once (arXiv:1910.02054, 7)."""
    size = 4 * catalog.model(MODEL).num_parameters

    def total(plan):  # the gradient norm and what a step reports aside
        rows = predict(make(plan)).breakdown
        return sum(row.link_bytes for row in rows if row.operator not in ("norm.reduce", "report.reduce"))

    sent = {stage: total([f"zero:stage={stage}"]) for stage in (1, 2, 3)}
    assert sent[1] == sent[2] == 2 * size
    layers = sum(p.numel for p in catalog.model(MODEL).parameters() if p.block.startswith("layers"))
    assert sent[3] == 2 * size + 4 * layers
    assert total([]) == size  # all-reduce of the gradients


def test_recompute_trades_arithmetic_for_memory():
    plain, again = predict(make()), predict(make(["recompute"]))
    assert memory(again)["activations"] < 0.1 * memory(plain)["activations"]
    assert again.metrics["step_time_s"].value > 1.2 * plain.metrics["step_time_s"].value

    def model_flops(r):  # per second, whatever was computed twice
        return r.metrics["mfu"].value * r.metrics["step_time_s"].value

    assert model_flops(again) == pytest.approx(model_flops(plain))
    assert plain.metrics["hfu"].value == pytest.approx(plain.metrics["mfu"].value)
    assert again.metrics["hfu"].value > 1.2 * again.metrics["mfu"].value
    half = predict(make(["recompute:every=2"]))
    assert memory(again)["activations"] < memory(half)["activations"] < memory(plain)["activations"]
    selective = predict(make(["recompute:policy=selective"]))
    assert memory(again)["activations"] < memory(selective)["activations"] < memory(plain)["activations"]


@pytest.mark.parametrize("plan", [[], ["flash_attention"], ["lora"], ["zero"]], ids=str)
def test_low_precision_multiplies_faster(plan):
    device = catalog.device("a100")
    ratio = device.peak_flops["bf16"] / device.peak_flops["fp32"]
    wide, mixed = predict(make(plan)), predict(make([*plan, "mixed_precision"]))
    assert seconds(mixed, kind="gemm") < 0.5 * seconds(wide, kind="gemm")
    assert seconds(mixed, kind="gemm") > seconds(wide, kind="gemm") / ratio
    if "flash_attention" in plan:  # else softmax keeps its fp32 result beside the bf16 copy
        assert memory(mixed)["activations"] < 0.7 * memory(wide)["activations"]
    assert memory(mixed).get("optimizer") == memory(wide).get("optimizer")  # the master weights stay fp32
    stored = predict(make(plan, dtype="bf16"))
    assert seconds(stored, kind="gemm") < 0.5 * seconds(wide, kind="gemm")


def test_flash_attention_needs_no_score_matrix():
    plain, flash = predict(make()), predict(make(["flash_attention"]))
    assert memory(flash)["activations"] < memory(plain)["activations"]
    assert not [row for row in flash.breakdown if row.kind in ("softmax", "bmm", "mask")]
    mixed, both = predict(make(["mixed_precision"])), predict(make(["mixed_precision", "flash_attention"]))
    assert both.metrics["step_time_s"].value < mixed.metrics["step_time_s"].value
    assert seconds(flash, kind="gemm") == seconds(plain, kind="gemm")


def test_nodes_are_slower_than_one_node():
    plan, each = ["zero:stage=3"], {"batch_size": 32}
    one, four = predict(make(plan, "32xa100", **each)), predict(make(plan, "4x8xa100", **each))
    assert seconds(four, phase="communication") > seconds(one, phase="communication")
    assert four.metrics["step_time_s"].value > one.metrics["step_time_s"].value
    assert seconds(four, phase="forward") == pytest.approx(seconds(one, phase="forward"))
    assert memory(four) == memory(one)


PLANS = [
    [],
    ["zero:stage=1"],
    ["zero:stage=3", "recompute"],
    ["mixed_precision", "flash_attention", "zero"],
    ["lora", "rtn", "recompute:every=2"],
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "+".join(p) or "none")
@pytest.mark.parametrize(
    ("on", "workload"),
    [("8xa100", {}), ("8xa100", {"micro_batch_size": 1}), ("4x8xa100", {}), ("2xxeon", {"batch_size": 4})],
    ids=["one node", "accumulation", "nodes", "cpu"],
)
def test_the_parts_sum_to_the_step(plan, on, workload):
    e = make(plan, on, **workload)
    r, events = predict(e), predict_trace(e)
    step = r.metrics["step_time_s"].value
    parts = sum(row.seconds if row.exposed_seconds is None else row.exposed_seconds for row in r.breakdown)
    assert parts == pytest.approx(step, rel=1e-9)
    exposed = sum(row.exposed_seconds for row in r.breakdown if row.phase == "communication")
    assert exposed == pytest.approx(r.metrics["exposed_communication_s"].value, abs=1e-12)
    # The trace covers the same step: each stream without overlaps, compute and what it waits for without gaps.
    assert max(v.start + v.seconds for v in events) == pytest.approx(step, rel=1e-9)
    for stream in ("compute", "communication"):
        mine = sorted((v.start, v.start + v.seconds) for v in events if v.stream == stream)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))
    busy = sum(v.seconds for v in events if v.stream == "compute")
    assert busy + exposed == pytest.approx(step, rel=1e-9)
    # Throughput balances.
    tokens = r.metrics["tokens_per_step"].value
    assert tokens == e.batch_size * 2048
    assert r.metrics["tokens_per_s"].value * step == pytest.approx(tokens)
    assert r.metrics["tokens_per_s_per_device"].value * e.world == pytest.approx(r.metrics["tokens_per_s"].value)


@pytest.mark.parametrize("plan", [[], ["growlength:lengths=128+512,shares=0.3+0.3"], ["cramming:tokens=1e9,ramp=0.5"],
                                  ["growlength:lengths=256,shares=0.5", "activation_offload"]])  # fmt: skip
def test_what_a_token_costs_is_what_the_time_costs_over_its_tokens(plan):
    """Over a whole run, too, whose sequences or batches grow; and the search compares the same numbers."""
    work = {"kind": "pretrain", "seq_len": 2048, "batch_size": 64, "micro_batch_size": 1}
    e = experiments.make("llama3.2-1b", "8xh100-sxm", work, ["mixed_precision", *plan])
    m, device = predict(e).metrics, e.cluster.device
    rate = m["tokens_per_s"].value
    assert m["dollars_per_million_tokens"].value * rate == pytest.approx(8 * device.price_per_hour / 3600 * 1e6)
    assert m["joules_per_token"].value * rate == pytest.approx(8 * device.watts)
    assert m["tokens_per_step"].value == pytest.approx(rate * m["step_time_s"].value)
    compared = quick(*resolve(e)).metrics
    assert {name: m[name].value for name in compared} == pytest.approx(compared)


def test_generation_balances():
    workload = {"kind": "generate", "prompt_len": 100, "output_len": 11, "batch_size": 3}
    r = predict(experiments.make(MODEL, "a100", workload, ["rtn", "flash_attention"]))
    ttft, tpot, total = (r.metrics[k].value for k in ("ttft_s", "tpot_s", "e2e_s"))
    assert total == pytest.approx(ttft + 10 * tpot)
    assert r.metrics["tokens_per_s"].value == pytest.approx(33 / total)
    assert seconds(r, phase="prefill") == pytest.approx(ttft)
    assert seconds(r, phase="decode") == pytest.approx(10 * tpot)
    m = catalog.model(MODEL)
    assert memory(r)["kv_cache"] == 2 * 2 * m.num_layers * m.kv_size * 3 * 111
    assert memory(r)["parameters"] < 0.6 * memory(predict(experiments.make(MODEL, "a100", workload, [])))["parameters"]


TOGETHER = [
    ["zero:stage=3", "recompute", "flash_attention", "mixed_precision"],
    ["lora", "rtn", "recompute:every=2", "flash_attention", "mixed_precision", "zero"],
    ["lora:rank=4,targets=o_proj", "recompute:policy=selective"],
]


@pytest.mark.parametrize("plan", TOGETHER, ids="+".join)
def test_techniques_together_on_the_whole_catalog(plan):
    for name in catalog.models():
        model = catalog.model(name)
        calls = [c for c in plan if c != "flash_attention" or not model.is_encoder_decoder]
        workload = {"kind": "pretrain", "seq_len": min(512, model.max_positions)}
        r = predict(experiments.make(name, "8xa100", workload, calls))
        assert all(math.isfinite(v.value) and v.value >= 0 for v in r.metrics.values()), name
        assert all(m.bytes >= 0 for m in r.memory), name
