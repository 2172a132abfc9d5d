"""The planner against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import training_graph
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.predict.quick import quick
from ridgeline.predict.step.peak_memory import resident, training_peak
from ridgeline.predict.step.training_step import update_ops
from ridgeline.search import Question, search
from ridgeline.search.answer_tables import load, trade
from ridgeline.search.expand import ranked
from ridgeline.search.found import Tried
from ridgeline.search.kinds import difference, kind_of
from ridgeline.search.question import HIGHER, parse_slo
from ridgeline.search.search import without_idle
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import FineTune, Generate, Pretrain, Serve
from ridgeline.techniques.registry import normalize, registry, resolve, techniques_of

FEW = frozenset({"zero", "recompute", "flash_attention", "mixed_precision", "data_parallel"})


def question(model="llama2-7b", on="8xa100-80g-sxm", goal="throughput", workload=None, **more) -> Question:
    work = workload or Pretrain(seq_len=2048, batch_size=32)
    return Question(catalog.model(model), catalog.cluster(on), work, goal, **{"only": FEW, **more})


_FEASIBLE: dict[tuple, list[dict]] = {}


def brute_force(q: Question) -> list[tuple[float, float]]:
    """(goal metric, peak) of every feasible plan, by trying every combination through ``predict``, whatever the goal
    once."""
    base = Experiment(model=q.model, cluster=q.cluster, workload=q.workload)
    key = base.id, q.only
    if key not in _FEASIBLE:
        _FEASIBLE[key] = feasible(q, base)
    return [(m[q.metric].value, m["peak_bytes"].value) for m in _FEASIBLE[key]]


def feasible(q: Question, base: Experiment) -> list[dict]:
    """The metrics of every plan that fits."""
    slots = [[None, *c.choices(base)] for c in q.techniques()]
    found = []
    for chosen in product(*slots):
        plan = Plan.parse([f"{t.card.name}:{_options(t)}" for t in chosen if t])
        for micro in (1, 2, 4):
            w = q.workload.model_copy(update={"micro_batch_size": micro})
            try:
                r = predict(normalize(base.model_copy(update={"plan": plan, "workload": w})))
            except Incompatible:
                continue
            if r.status == "ok":
                found.append(r.metrics)
    return found


def _options(t) -> str:
    return ",".join(f"{k}={v}" for k, v in t.model_dump(exclude_none=True).items())


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
def test_the_best_plan_is_that_of_brute_force(goal):
    q = question(goal=goal)
    values = [v for v, _ in brute_force(q)]
    best = search(q, workers=1).best[0]
    assert best.metrics[q.metric] == pytest.approx(max(values) if goal == "throughput" else min(values))


def test_cost_may_use_fewer_devices():
    q = question(goal="cost")
    best = search(q, workers=1).best[0]
    costs = []
    for n in (8, 4, 2, 1):
        costs += [v for v, _ in brute_force(replace(q, cluster=catalog.cluster(f"{n}xa100-80g-sxm")))]
    assert best.metrics[q.metric] == pytest.approx(min(costs))


def test_the_front_is_not_beaten_by_any_plan():
    q = question()
    everything = brute_force(q)
    for t in search(q, workers=1).found.front:
        rate, peak = t.metrics["tokens_per_s"], t.metrics["peak_bytes"]
        assert not any(v > rate * (1 + 1e-9) and p < peak * (1 - 1e-9) for v, p in everything)


def test_every_candidate_is_accounted_for():
    c = search(question(), workers=1).found.counts
    assert c["considered"] == c["refused"] + c["bounded"] + c["oversize"] + c["missed"] + c["feasible"]


def test_workers_change_nothing():
    one, two = search(question(), workers=1), search(question(), workers=2)
    assert [t.key for t in one.best] == [t.key for t in two.best]
    assert one.found.counts["considered"] == two.found.counts["considered"]


def test_forbidden_and_allowed_techniques():
    assert all("flash_attention" not in t.names for t in search(question(forbid=frozenset({"flash_attention"}))).best)
    only = frozenset({"zero", "mixed_precision"})
    assert all(t.names <= only for t in search(question(only=only)).best)
    with pytest.raises(UserError, match="zeero"):
        question(forbid=frozenset({"zeero"}))
    with pytest.raises(UserError, match="speed"):
        question(goal="speed")


MANY = frozenset({"pipeline", "ring_attention", "zero_offload", "zero_infinity", "activation_offload"})
TUNED = Question(
    catalog.model("llama2-7b"), catalog.cluster("2xa100-80g-sxm"), FineTune(seq_len=512, batch_size=4), forbid=MANY
)


def test_pretraining_trains_everything():
    asked = question(only=frozenset(), allow=frozenset({"lora"}))
    assert "lora" not in {c.card.name for c in asked.techniques()}


def test_what_changes_quality_is_asked_for():
    left = set(TUNED.left_to_the_user())
    assert {"lora", "qlora", "bitfit"} <= left
    assert not left & {"flash_attention", "mixed_precision", "zero", "recompute"}
    assert all(not t.names & left for t in search(TUNED, workers=1).best)
    asked = replace(TUNED, allow=frozenset({"lora"}))
    assert asked.left_to_the_user() == [n for n in TUNED.left_to_the_user() if n != "lora"]
    assert "lora" in search(asked, workers=1).best[0].names


def test_a_fixed_technique_is_in_every_plan():
    plan = Plan.parse(["lora:rank=64", "recompute"])
    answer = search(replace(TUNED, fixed=plan), workers=1)
    assert answer.best
    for t in answer.best:
        assert t.experiment.plan.option("lora", "rank") == 64
        assert "recompute" in t.names
    with pytest.raises(UserError, match="ranck"):
        replace(TUNED, fixed=Plan.parse(["lora:ranck=2"]))


def test_answers_differ_in_kind_and_each_offers_something():
    best = search(question(only=frozenset(), forbid=MANY - {"pipeline"}), workers=1).best
    assert len({t.kind for t in best}) == len(best) > 2
    for i, t in enumerate(best):
        for other in best[:i]:
            faster = t.metrics["tokens_per_s"] / other.metrics["tokens_per_s"]
            spare = (other.metrics["peak_bytes"] - t.metrics["peak_bytes"]) / t.experiment.cluster.device.memory_bytes
            assert faster >= 1.03 or spare >= 0.03 or len(t.kind) < len(other.kind)


def test_a_plan_that_is_slower_and_larger_offers_nothing_for_having_fewer_techniques():
    """With as many ways of dividing and moving; the same without the larger part of them does."""
    q = Question(catalog.model("llama2-13b"), catalog.cluster("8xrtx4090"), FineTune(seq_len=350, batch_size=8))

    def tried(*plan, micro=1):
        workload = q.workload.model_copy(update={"micro_batch_size": micro})
        e = normalize(experiments.make("llama2-13b", "8xrtx4090", workload.model_dump(), plan))
        return ranked(q, e, quick(e, techniques_of(e.plan), always=True))

    first = tried("tensor_parallel:degree=8", "flash_attention", "mixed_precision:weights=low", "fused_layers",
                  "zero_infinity", micro=8)  # fmt: skip
    second = tried("pipeline:degree=8,schedule=interleaved,chunks=2", "flash_attention", "zero_offload",
                   "activation_offload")  # fmt: skip
    assert len(second.names) < len(first.names)
    assert second.metrics["tokens_per_s"] < first.metrics["tokens_per_s"]
    assert second.metrics["peak_bytes"] > first.metrics["peak_bytes"]
    assert not second.offers_beside(first, q)
    assert tried("zero:stage=3").offers_beside(second, q)


def test_kinds_are_words_not_degrees_and_options():
    def kind(*plan, task="pretrain", on="8xa100-80g-sxm"):
        workload = {"kind": task, "rate": 1.0} if task == "serve" else {"kind": task, "seq_len": 512, "batch_size": 16}
        return kind_of(experiments.make("llama2-7b", on, workload, plan))

    sharded = kind("mixed_precision", "zero:stage=3")
    assert sharded == kind("flash_attention", "zero:stage=1") == ("sharding",)
    other = kind("tensor_parallel:degree=2", "sequence_parallel", "recompute", "zero_offload", "zero:stage=2")
    assert other == ("tensor parallelism", "recomputation", "sharding", "optimizer offload")
    assert difference(sharded, other) == "no tensor parallelism, no recomputation, no optimizer offload"
    assert kind("zero_inference:resident=31", task="serve") == ("weight offload",)
    assert kind("zero_inference:resident=32", task="serve") == ()
    assert kind("tensor_parallel:degree=4", task="serve") == ("tensor parallelism over 4",)
    assert difference(("tensor parallelism over 2",), ("tensor parallelism over 4",)) == "tensor parallelism over 2"


def test_of_engines_that_keep_up_with_the_arrivals_the_fastest_is_first():
    workload = Serve(rate=2.0, requests=60, prompt_len=256, output_len=64)
    only = frozenset({"tensor_parallel", "continuous_batching"})
    q = Question(catalog.model("llama2-13b"), catalog.cluster("4xh100-sxm"), workload, only=only)
    first, *others = search(q, workers=1).best
    assert others
    assert all(t.metrics["e2e_s"] > first.metrics["e2e_s"] for t in others)
    assert all("TPOT" in trade(t, first, q.metric) for t in others)


def test_plans_for_long_prompts_have_attention_in_one_kernel():
    workload = Serve(rate=4.0, requests=60, prompt_len=1024, output_len=64)
    only = frozenset({"flash_attention", "tensor_parallel", "continuous_batching", "padding_free"})
    for goal in ("latency", "throughput"):
        q = Question(catalog.model("llama2-13b"), catalog.cluster("8xa100-80g-sxm"), workload, only=only, goal=goal)
        assert all("flash_attention" in t.names for t in search(q, workers=1).best)


@pytest.mark.parametrize(("model", "on"), [("llama3.1-70b", "8xa100-80g-sxm"), ("qwen3-32b", "2xl40s")])
def test_a_model_too_large_for_one_device_is_served_as_well_as_one_that_fits(model, on):
    """What one plan needs beside the division of the model is found beside it: batches that change from step to step,
    without padding. Best is as good as the engine that has all of it."""
    workload = Serve(rate=4.0, requests=60, prompt_len=256, output_len=64, length_cv=0.3)
    apart = frozenset({"pipeline", "length_dp", "hierarchical_search"})
    q = Question(catalog.model(model), catalog.cluster(on), workload, forbid=apart)
    best = search(q, workers=1).best[0]
    assert {"tensor_parallel", "continuous_batching", "padding_free"} <= best.names
    division = next(c for c in best.experiment.plan.strings() if c.startswith("tensor_parallel"))
    fields = {**workload.model_dump(exclude_unset=True), "kind": "serve", "engine": "vllm"}
    vllm = predict(experiments.make(model, on, fields, [division]))
    assert best.metrics["tokens_per_s"] >= 0.95 * vllm.metrics["tokens_per_s"].value
    assert best.metrics["e2e_s"] <= 1.1 * vllm.metrics["e2e_s"].value


def test_plans_say_what_they_were_judged_by_in_every_task():
    """Which layout is fastest depends on the batch: BERT's 16 sequences of 512 tokens over PCIe favor stages."""
    step = load(Pretrain(seq_len=512, batch_size=16))
    assert step == ["load: 16 sequences of 512 tokens in a step (--batch-size, --seq-len)"]
    left_open = question(workload=Pretrain(seq_len=512))
    assert load(left_open.workload)[0].startswith(f"load: {4 * left_open.cluster.size} sequences of 512 tokens")
    pass_ = load(Generate(prompt_len=512, output_len=64))
    assert pass_ == ["load: sequences of 512 + 64 tokens (--prompt-len, --output-len)"]


def test_a_serving_load_that_is_left_open_shows_what_the_devices_can_do():
    q = Question(catalog.model("llama3.1-8b"), catalog.cluster("h100-sxm"), Serve(requests=40))
    assert q.workload.concurrency == 40
    at_once, equal = load(q.workload)
    assert at_once == "load: 40 requests at once, of 512 + 128 tokens (--rate, --concurrency)"
    assert equal.startswith("all requests have the same lengths")
    assert "--length-cv" in equal
    assert len(load(q.workload.model_copy(update={"length_cv": 0.5}))) == 1
    assert len(load(q.workload.model_copy(update={"output_cv": 0.5}))) == 1
    for kept in (replace(q, workload=Serve(), goal="latency"), replace(q, workload=Serve(), slo={"tpot_s": 0.1})):
        assert kept.workload.open_load
        assert load(kept.workload) == ["load: 1 requests/s, of 512 + 128 tokens (--rate, --concurrency)"]
    # One request per second is what arrives then: engines that keep up have its throughput.
    metrics = {"tokens_per_s": 129.0, "requests_per_s": 1.01, "e2e_s": 5.0}
    assert replace(q, workload=Serve(rate=1.0)).rank(metrics) == replace(kept, slo={"tpot_s": 0.2}).rank(metrics)


def test_the_format_in_which_a_model_is_published_needs_no_permission():
    def lossy(model, task=None, **more):
        q = Question(catalog.model(model), catalog.cluster("8xh100-sxm"), task or Serve(), **more)
        found = {c.card.name: q.choices(c, q.base(q.cluster)) for c in q.techniques()}
        return {name: ts for name, ts in found.items() if not registry()[name].card.lossless}

    assert not lossy("llama3.1-8b")
    assert lossy("deepseek-v3").keys() == {"fp8"}
    assert [t.layers for t in lossy("gpt-oss-20b")["mxfp4"]] == ["experts"]
    assert len(lossy("gpt-oss-20b", allow=frozenset({"mxfp4"}))["mxfp4"]) == 2  # asked for: of all layers, too
    assert "mxfp4" not in lossy("gpt-oss-20b", Pretrain(seq_len=64, batch_size=8))


def test_serving_offloads_only_what_fits_nowhere():
    only = frozenset({"tensor_parallel", "zero_inference", "continuous_batching", "padding_free"})
    work = Serve(concurrency=8, requests=8, prompt_len=64, output_len=16)
    whole = search(Question(catalog.model("llama2-13b"), catalog.cluster("2xrtx4090"), work, only=only), workers=1)
    assert not whole.found.with_technique.keys() & {"zero_inference"}
    assert whole.found.counts["dominated"] > 0
    seen = []
    q = Question(catalog.model("llama2-13b"), catalog.cluster("1xrtx4090"), work, only=only)
    alone = search(q, workers=1, progress=lambda done, of: seen.append((done, of)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * seen[0][1]  # as many again, behind the first
    assert all("zero_inference" in t.names for t in alone.best)
    assert alone.best


def test_what_changes_nothing_leaves_the_plan():
    workload = {"kind": "serve", "rate": 2.0, "requests": 30, "prompt_len": 256, "output_len": 64}
    plan = ["tensor_parallel:degree=4", "continuous_batching", "hierarchical_search"]
    e = experiments.make("llama2-13b", "4xh100-sxm", workload, plan)
    q = Question(e.model, e.cluster, e.workload)
    with_all = Tried(e, quick(e, techniques_of(e.plan)), -1.0)
    kept = without_idle(q, with_all, (registry()["hierarchical_search"](), registry()["continuous_batching"]()))
    assert kept.names == {"tensor_parallel", "continuous_batching"}


def test_a_plan_unlike_any_that_was_measured_must_win_by_more():
    """Of two plans, the proven one is ranked first unless the other is ahead by more than whole steps are off."""
    proven, unlike = question(), question(fixed=Plan.parse(["ring_attention:degree=2"]))
    for q, handicap in ((proven, 1.0), (unlike, 1.05)):
        found = search(q, workers=1).best
        assert found
        assert all(bool(t.unvalidated) == (q is unlike) for t in found)
        assert all(t.rank == pytest.approx(q.rank(t.metrics) / handicap, rel=1e-12) for t in found)


def test_a_schedule_that_nobody_measured_must_win_by_more_than_one_that_was_measured():
    """Without bubbles, stages of a small model are predicted 2 % faster than interleaved: no reason to prefer them."""
    e = experiments.make("bert-large", "4xl40s", {"kind": "pretrain", "seq_len": 512, "batch_size": 16}, [])
    only = frozenset({"pipeline", "mixed_precision", "flash_attention", "fused_layers"})
    q = Question(e.model, catalog.cluster("4xl40s"), e.workload, only=only)
    best = search(q, workers=1).best[0]
    assert any("schedule=interleaved" in call for call in best.experiment.plan.strings())
    calls = [c.replace("interleaved,chunks=2", "zero_bubble,chunks=1") for c in best.experiment.plan.strings()]
    unlike = predict(best.experiment.model_copy(update={"plan": Plan.parse(calls)}))
    assert 1 < unlike.metrics["tokens_per_s"].value / best.metrics["tokens_per_s"] < 1.05
    assert any("measurement was at hand of pipeline:schedule=zero_bubble in pretrain" in note for note in unlike.notes)


@pytest.mark.parametrize(
    "plan",
    [
        ["mixed_precision:weights=low", "zero:stage=3"],
        ["mixed_precision", "zero:stage=1", "recompute"],
        ["mixed_precision:weights=low", "zero_offload", "zero:stage=2"],
        ["mixed_precision", "zero:stage=3", "zero_infinity:parameters=cpu,optimizer=cpu"],
        ["mixed_precision", "tensor_parallel:degree=2", "pipeline:degree=4,schedule=interleaved,chunks=2"],
        ["tensor_parallel:degree=2", "pipeline:degree=2", "zero:stage=1", "lora"],
        ["lomo", "mixed_precision", "zero:stage=3"],
    ],
)
def test_what_rules_a_plan_out_by_its_states_is_below_its_peak(plan):
    work = {"kind": "finetune", "seq_len": 512, "batch_size": 16, "micro_batch_size": 1}
    e, techniques = resolve(experiments.make("llama2-7b", "8xa100-80g-sxm", work, plan))
    g = rewritten(training_graph(e), e, techniques)
    update_ops(g, e)
    held, peak = resident(g), training_peak(g)
    assert sum(held.values()) <= peak.total * (1 + 1e-9)


def test_a_search_does_not_choose_stale_updates():
    e = question().base(catalog.cluster("8xrtx4090"))
    assert [t.delayed for t in registry()["zero_offload"].choices(e)] == [False]


def test_a_limit_is_kept():
    w = Generate(batch_size=8, prompt_len=512, output_len=64)
    free = search(question(workload=w, on="a100-80g-sxm", free_batch=True, only=frozenset({"flash_attention"})))
    limit = free.best[0].metrics["tpot_s"] * 0.9
    kept = search(
        question(
            workload=w, on="a100-80g-sxm", free_batch=True, only=frozenset({"flash_attention"}), slo={"tpot_s": limit}
        )
    )
    assert kept.best
    assert all(t.metrics["tpot_s"] <= limit for t in kept.best)
    assert kept.found.counts["missed"] > 0


def test_limits_as_text():
    assert parse_slo(["tpot_s=50ms", "ttft_s=0.5", "peak_bytes=20GiB"]) == {
        "tpot_s": pytest.approx(0.05),
        "ttft_s": 0.5,
        "peak_bytes": 20 * 2**30,
    }
    for bad in ("tpot_s", "tpot_s=", "=3", "tpot_s=-1", "tpot_s=soon", "tpot_s=inf"):
        with pytest.raises(UserError, match="METRIC=LIMIT"):
            parse_slo([bad])


def test_a_limit_on_memory_is_kept_by_a_slower_plan():
    """Faster plans that break the limit must not prune those that keep it."""
    free = search(question(), workers=1).best[0]
    limit = 0.5 * free.metrics["peak_bytes"]
    fitting = [(v, p) for v, p in brute_force(question()) if p <= limit]
    best = search(question(slo={"peak_bytes": limit}), workers=1).best[0]
    assert best.metrics["peak_bytes"] <= limit
    assert best.metrics["tokens_per_s"] == pytest.approx(max(v for v, _ in fitting))


SERVED = Serve(rate=4.0, prompt_len=64, output_len=8, requests=10, slo_ttft=10.0, slo_tpot=10.0)


@pytest.mark.parametrize("workload", [Pretrain(seq_len=512, batch_size=1), Generate(batch_size=1), SERVED])
def test_more_is_better_of_what_predictions_say_so(workload):
    e = Experiment(model=catalog.model("gpt2"), cluster=catalog.cluster("a100-80g-sxm"), workload=workload)
    metrics = predict(normalize(e)).metrics
    assert {n for n, m in metrics.items() if m.better == "higher"} == HIGHER & metrics.keys()


def test_a_limit_on_goodput_is_the_least_allowed():
    q = question("gpt2", "a100-80g-sxm", workload=SERVED, only=frozenset({"paged_kv"}), slo={"slo_share": 0.9})
    assert search(q, workers=1).best
    assert q.misses({"slo_share": 0.5}) == ["slo_share 0.5 below the limit 0.9"]
    assert q.misses({"slo_share": 0.0}) == ["slo_share 0 below the limit 0.9"]


def test_techniques_that_cannot_be_in_a_plan_are_not_silently_left_out():
    with pytest.raises(UserError, match="gptq does not apply to task 'finetune'"):
        replace(TUNED, allow=frozenset({"gptq"}))
    with pytest.raises(UserError, match="no technique of --only applies to task 'finetune': gptq"):
        replace(TUNED, only=frozenset({"gptq"}))
    with pytest.raises(UserError, match="lora is both allowed and forbidden"):
        replace(TUNED, allow=frozenset({"lora"}), forbid=frozenset({"lora"}))
    with pytest.raises(UserError, match="lora is in every plan and forbidden"):
        replace(TUNED, fixed=Plan.parse(["lora"]), forbid=frozenset({"lora"}))


def test_fixed_techniques_that_exclude_each_other_are_a_mistake():
    with pytest.raises(Incompatible, match="qlora also decides which parameters train"):
        replace(TUNED, fixed=Plan.parse(["lora", "qlora"]))


def test_the_trade_of_an_alternative_is_in_words():
    first, *others = search(question(), workers=1).best
    assert trade(first, first, "tokens_per_s") == "–"
    assert others
    for t in others:
        text = trade(t, first, "tokens_per_s")
        change = t.metrics["tokens_per_s"] / first.metrics["tokens_per_s"] - 1
        assert ("faster" in text, "slower" in text) == (change >= 0.005, change <= -0.005)
        for words in {*t.kind} ^ {*first.kind}:
            assert (f"no {words}" in text) == (words in first.kind)


def test_gradients_are_reduced_also_where_only_the_sequence_is_divided():
    """Ranks of one sequence sum gradients too: a plan without a technique that does so is none of the answers."""
    only = frozenset({"flash_attention", "mixed_precision", "zero", "data_parallel"})
    q = question(on="2xa100-80g-sxm", only=only, fixed=Plan.parse(["ring_attention:degree=2"]))
    best = search(q, workers=1).best
    assert best
    assert all(t.names & {"zero", "data_parallel"} for t in best)


def test_every_way_to_offload_is_compared():
    """A model that does not fit: the best of what each technique settles alone, with its options filled in."""
    work = Generate(batch_size=16, prompt_len=256, output_len=64)
    q = question("llama2-13b", "rtx4090", workload=work, only=frozenset())
    answer = search(q, workers=1)
    alone = {}
    offload = "zero_inference:resident=auto"
    for call in (offload, f"{offload},parameters=nvme", f"{offload},fetch=modules,prefetch=0.5", "flexgen"):
        e = experiments.make("llama2-13b", "rtx4090", work.model_dump(), ["flash_attention", call])
        alone[call] = predict(e).metrics["tokens_per_s"].value
    assert answer.best[0].metrics["tokens_per_s"] == pytest.approx(max(alone.values()))
    for name in ("zero_inference", "flexgen"):
        best = max(rate for call, rate in alone.items() if call.startswith(name))
        assert answer.found.with_technique[name].metrics["tokens_per_s"] == pytest.approx(best)
    for t in answer.best:
        assert resolve(t.experiment)[0].plan == t.experiment.plan, "nothing is left open in a plan that is written down"


def test_what_helps_only_together_is_found():
    """Continuous batching gains nothing on whole replicas, and a divided model nothing without it: one device has room
    for the model, and equal requests of few clients stay in step."""
    workload = Serve(concurrency=64, requests=128)
    together = frozenset({"tensor_parallel", "continuous_batching"})
    model, cluster = catalog.model("llama3.1-70b"), catalog.cluster("4xmi300x")
    few = search(Question(model, cluster, workload, only=together), workers=1).best[0]
    rest = frozenset({"pipeline", "hierarchical_search"})
    best = search(Question(model, cluster, workload, forbid=rest), workers=1).best[0]
    assert few.names == together
    assert best.metrics["tokens_per_s"] >= 0.99 * few.metrics["tokens_per_s"]


def test_three_that_help_only_together_are_found():
    """Long prompts: chunks and continuous batching lose in padded batches, and without both packing changes nothing."""
    workload = Serve(concurrency=16, requests=48, prompt_len=8192)
    q = Question(catalog.model("llama3.1-8b"), catalog.cluster("h100-sxm"), workload)
    best = search(q, workers=1).best[0]
    assert {"continuous_batching", "chunked_prefill", "padding_free"} <= best.names


def test_a_fixed_technique_that_splits_the_batch_needs_no_other():
    q = question("gpt2", "2xa100-80g-sxm", workload=Pretrain(seq_len=128, batch_size=8), only={"flash_attention"})
    best = search(replace(q, fixed=Plan.parse(["zero:stage=3"])), workers=1).best[0]
    assert best.names == {"zero", "flash_attention"}
    assert best.experiment.gradient_ranks == 2
