"""Limits on memory and time: bounds of what a plan takes, and how many plans are predicted."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest

from ridgeline import catalog
from ridgeline.predict.quick import computation, least_bytes, prepare, quick, split
from ridgeline.search import Question, search
from ridgeline.search.expand import ranked
from ridgeline.search.least_memory import LeastMemory, held_parameters
from ridgeline.search.space import beside, candidate, refusal, slots, splits_batch, with_open_options
from ridgeline.search.why import _looser, closest_miss, relaxations
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import FineTune, Generate, Pretrain, Serve
from ridgeline.techniques.registry import techniques_of

FEW = frozenset({"tensor_parallel", "recompute", "flash_attention", "mixed_precision", "data_parallel", "zero",
                 "zero_infinity", "activation_offload"})  # fmt: skip
WORK = Pretrain(seq_len=2048, batch_size=8)


def question(goal="throughput", on="2xh100-sxm", workload=WORK, **more) -> Question:
    return Question(catalog.model("llama2-7b"), catalog.cluster(on), workload, goal, **{"only": FEW, **more})


@pytest.fixture
def predicted(monkeypatch):
    """The plans that searches predict."""
    plans = []
    module = sys.modules["ridgeline.search.expand"]

    def counted(e, *args, **options):
        plans.append(e)
        return quick(e, *args, **options)

    monkeypatch.setattr(module, "quick", counted)
    return plans


@pytest.mark.parametrize("micro", [1, 4])
def test_the_bound_holds_for_every_placement(micro):
    q = question("memory", "4xh100-sxm", only=FEW | {"pipeline", "zero_offload"})
    base = q.base(q.cluster)
    space = slots(q, base, q.techniques())
    judged = 0
    for mesh in space.combinations("mesh"):
        for shape in list(space.combinations("shape"))[::5]:
            if refusal(candidate(base, mesh + shape)):
                continue
            core = prepare(*candidate(base, mesh + shape, micro))
            for stages in list(space.combinations("split"))[::3]:
                e, techniques = candidate(base, mesh + shape + stages, micro)
                if refusal((e, techniques), whole=True):
                    continue
                bound = least_bytes(split(core, e, techniques), e)
                for placement in beside(mesh + shape, space.placements)[0]:
                    point = candidate(base, mesh + shape + stages + placement, micro)
                    if splits_batch(placement) != (e.gradient_ranks > 1) or refusal(point):
                        continue
                    point = with_open_options(*point)[:2]
                    assert bound <= quick(*point, always=True).metrics["peak_bytes"]
                    judged += 1
    assert judged > 100


def test_what_other_micro_batches_and_shapes_have_shown_never_exceeds_the_peak():
    q = question(on="4xh100-sxm", only=FEW | {"pipeline", "zero_offload", "fused_layers"})
    base = q.base(q.cluster)
    space = slots(q, base, q.techniques())
    states, judged, shared = {}, 0, 0
    shapes = [s for s in space.combinations("shape") if any(t.card.name == "mixed_precision" for t in s)]
    for mesh in list(space.combinations("mesh"))[:2]:
        for shape, micro in product(shapes[::2], (1, 4)):
            core = prepare(*candidate(base, mesh + shape, micro))
            for stages in list(space.combinations("split"))[::4]:
                e, techniques = candidate(base, mesh + shape + stages, micro)
                if refusal((e, techniques), whole=True):
                    continue
                setting = mesh, held_parameters(core), stages, e.accumulation > 1
                memory = LeastMemory(split(core, e, techniques), setting, states, tight=True)
                for placement in beside(mesh + shape, space.placements)[0]:
                    point = candidate(base, mesh + shape + stages + placement, micro)
                    if splits_batch(placement) != (e.gradient_ranks > 1) or refusal(point):
                        continue
                    found = quick(*point, always=True)
                    shared += (*setting, placement) in states
                    assert not memory.exceeds(found.metrics["peak_bytes"] * (1 + 1e-9), placement, compute=True)
                    memory.learn(placement, found)
                    judged += 1
    assert judged > 200
    assert shared > judged / 2


@pytest.mark.parametrize("on", ["4xh100-sxm", "2xrtx4090"])
def test_bounds_of_memory_leave_out_no_answer(on, monkeypatch, predicted):
    q = question(on=on, workload=Pretrain(seq_len=2048, batch_size=64))
    bounded, few = search(q, workers=1), len(predicted)
    monkeypatch.setattr(LeastMemory, "exceeds", lambda *_, **__: False)
    monkeypatch.setattr(LeastMemory, "activations", lambda *_: 0.0)
    predicted.clear()
    whole = search(q, workers=1)
    assert [(t.calls, t.metrics) for t in bounded.best] == [(t.calls, t.metrics) for t in whole.best]
    assert [(t.calls, t.metrics) for t in bounded.found.front] == [(t.calls, t.metrics) for t in whole.found.front]
    assert few < len(predicted)


@pytest.mark.parametrize("workload", [WORK, FineTune(seq_len=2048, batch_size=8)], ids=lambda w: w.kind)
@pytest.mark.parametrize("goal", ["throughput", "memory"])
def test_a_limit_that_no_plan_keeps_is_answered_by_the_least(workload, goal, predicted):
    least = search(question("memory", workload=workload), workers=1).best[0]
    peak = least.metrics["peak_bytes"]
    predicted.clear()
    answer = search(question(goal, workload=workload, slo={"peak_bytes": 0.5 * peak}), workers=1)
    assert not answer.best
    assert closest_miss(answer)[0].metrics["peak_bytes"] == peak
    assert closest_miss(answer)[1].startswith("peak_bytes")
    assert len(predicted) < 400  # without bounds 828


def test_a_limit_that_one_plan_keeps_has_it_as_its_answer():
    peak = search(question("memory"), workers=1).best[0].metrics["peak_bytes"]
    answer = search(question(slo={"peak_bytes": 1.001 * peak}), workers=1)
    assert peak <= answer.best[0].metrics["peak_bytes"] <= 1.001 * peak


def test_the_least_memory_is_found_without_timing_what_is_far_from_it():
    answer = search(question("memory"), workers=1)
    counts = answer.found.counts
    assert counts["feasible"] < 104  # of 208 that fit
    assert sum(v for k, v in counts.items() if k != "considered") == counts["considered"]


@pytest.mark.parametrize(("goal", "name"), [("throughput", "tokens_per_s"), ("latency", "step_time_s")])
def test_a_limit_on_time_that_no_plan_keeps_is_missed_by_least_by_the_fastest(goal, name, predicted):
    """Not by plans that exceed the host's memory and so have no time."""
    q = question(goal, "8xh100-sxm", workload=Pretrain(seq_len=4096, batch_size=64))
    best = search(q, workers=1).best[0]
    free, limit = len(predicted), best.metrics[name] * (2 if name == "tokens_per_s" else 0.5)
    predicted.clear()
    answer = search(replace(q, slo={name: limit}), workers=1)
    assert not answer.best
    assert closest_miss(answer)[0].metrics == best.metrics
    assert _looser(answer).change.startswith(name)
    assert len(predicted) < 4 * free  # without a bound 32 times as many


@pytest.mark.parametrize("goal", ["cost", "memory"])
def test_a_limit_on_time_bounds_the_search_for_another_goal(goal, predicted):
    q = question(goal, "8xh100-sxm", workload=Pretrain(seq_len=4096, batch_size=64))
    fast = search(replace(q, goal="throughput"), workers=1)
    fastest, seconds = fast.best[0], fast.best[0].metrics["step_time_s"]
    fitting = [t for t in fast.found.fitting.values() if t.metrics["step_time_s"] <= 1.2 * seconds]
    predicted.clear()
    kept = search(replace(q, slo={"step_time_s": 1.2 * seconds}), workers=1)
    few = len(predicted)
    predicted.clear()
    if goal == "memory":  # the least of all is far from those that are fast
        search(replace(q, slo={"step_time_s": 1e9}), workers=1)
        assert few < len(predicted)
    assert len(fitting) > 5
    assert kept.best[0].rank <= min(ranked(kept.question, t.experiment, t.quick).rank for t in fitting)
    assert kept.best[0].metrics["step_time_s"] <= 1.2 * seconds
    missed = search(replace(q, slo={"step_time_s": 0.5 * seconds}), workers=1)
    assert not missed.best
    assert closest_miss(missed)[0].metrics == fastest.metrics


def test_a_limit_on_time_that_no_plan_keeps_is_missed_by_a_plan_that_fits():
    """On the most devices, where fewer have no room for the model."""
    q = question("cost", "8xh100-sxm", Pretrain(seq_len=4096, batch_size=64), slo={"step_time_s": 0.5},
                 only=FEW - {"zero_infinity", "activation_offload"})  # fmt: skip
    answer = search(q, workers=1)
    assert not answer.best
    near, misses = closest_miss(answer)
    assert near.quick.fits
    assert near.experiment.cluster.size == 8
    assert misses.startswith("step_time_s")


@pytest.mark.parametrize("goal", ["cost", "memory"])
def test_a_limit_on_the_mean_time_of_steps_that_grow_is_kept(goal):
    """Also where a step of full length takes longer than the limit."""
    model = catalog.model("llama2-7b").model_copy(update={"num_layers": 2, "max_positions": 65536})
    fixed = Plan(calls=[Call(name="growlength")])
    q = Question(model, catalog.cluster("2xh100-sxm"), Pretrain(batch_size=2, seq_len=65536), fixed=fixed,
                 only=frozenset({"flash_attention", "mixed_precision", "data_parallel", "zero"}))  # fmt: skip
    fastest = search(q, workers=1).best[0]
    full = computation(fastest.experiment, techniques_of(Plan(calls=fastest.experiment.plan.calls[:-1])))
    seconds = fastest.metrics["step_time_s"]
    assert fastest.experiment.plan.calls[-1].name == "growlength"
    assert full > 1.01 * seconds
    kept = search(replace(q, goal=goal, slo={"step_time_s": 1.01 * seconds}), workers=1)
    assert kept.best[0].metrics["step_time_s"] <= 1.01 * seconds


@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_an_open_batch_is_the_same_in_every_layout(goal):
    """Seconds of steps of different sizes would not compare."""
    left_open, given = (question(goal, workload=Pretrain(seq_len=2048, batch_size=size)) for size in (None, 8))
    assert search(left_open, workers=1).best[0].key == search(given, workers=1).best[0].key
    free, limited = (search(replace(left_open, slo=slo), workers=1) for slo in ({}, {"tokens_per_s": 1.0}))
    assert limited.best[0].key == free.best[0].key


@pytest.mark.parametrize("slo", [{}, {"step_time_s": 0.01}], ids=["no limit", "a limit that no plan keeps"])
def test_cost_needs_a_price(slo):
    with pytest.raises(UserError, match="needs dollars_per_million_tokens, which is not predicted for h20"):
        search(question("cost", "4xh20", slo=slo), workers=1)


@pytest.mark.parametrize("workload", [WORK, Generate(), Serve(rate=4.0, prompt_len=64, output_len=8, requests=10)])
def test_no_way_out_is_searched_for_a_rate_beyond_all_devices(workload, predicted):
    """More devices than any ladder has do not give it: nothing is predicted to say so."""
    answer = search(question(workload=workload, slo={"tokens_per_s": 1e9}), workers=1)
    assert not answer.best
    assert predicted
    predicted.clear()
    ways = relaxations(answer)
    assert [way.change.split("=")[0] for way in ways] == ["tokens_per_s"]
    assert not predicted


def test_only_a_search_for_any_plan_leaves_out_what_is_too_slow(predicted):
    """A limit within the peak of the devices, which computation alone exceeds."""
    q = question(workload=Pretrain(seq_len=2048, batch_size=64), slo={"step_time_s": 3.0})
    assert not search(q, workers=1, first_feasible=True).best
    assert not predicted
    answer = search(q, workers=1)
    assert predicted
    assert closest_miss(answer)[0].quick.fits


def test_the_way_out_by_a_technique_is_a_proven_one():
    """All adapters make 7B fit; bitfit, which comes first by name, was never compared with published measurements."""
    off = frozenset({"zero_offload", "zero_infinity", "activation_offload", "lomo"})
    q = Question(
        catalog.model("llama2-7b"), catalog.cluster("rtx4090"), FineTune(seq_len=256, batch_size=1), forbid=off
    )
    answer = search(q, workers=1)
    assert not answer.best
    assert "--allow lora" in [r.change for r in relaxations(answer)]
