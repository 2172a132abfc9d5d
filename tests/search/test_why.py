"""Reasons against what the planner does not choose, and ways out where nothing is feasible."""

from __future__ import annotations

import re
from dataclasses import replace

from ridgeline import catalog, experiments
from ridgeline.predict.quick import quick
from ridgeline.search import Question, search
from ridgeline.search.found import Tried
from ridgeline.search.why import _unproven, closest_miss, relaxations, why_not
from ridgeline.spec.workload import FineTune, Generate, Pretrain
from ridgeline.techniques.registry import techniques_of

FEW = frozenset({"zero", "recompute", "flash_attention", "mixed_precision", "data_parallel"})


def question(model="llama2-7b", on="8xa100-80g-sxm", goal="throughput", workload=None, **more) -> Question:
    work = workload or Pretrain(seq_len=2048, batch_size=32)
    return Question(catalog.model(model), catalog.cluster(on), work, goal, **{"only": FEW, **more})


def test_no_feasible_plan_has_a_closest_miss_and_a_way_out():
    q = question(model="llama2-70b", on="8xrtx4090")
    answer = search(q)
    assert answer.best == []
    near, misses = closest_miss(answer)
    assert near.over > 1
    assert "exceed the 24 GiB of rtx4090" in misses
    found = {r.change: r for r in relaxations(answer)}
    assert any(change.endswith("devices") or "GiB)" in change for change in found)
    # The smallest number of devices that works is named: one step less does not work.
    devices = next((c for c in found if c.endswith(" devices")), None)
    if devices:
        half = int(devices.split()[0]) // 2
        fewer = replace(q, cluster=q.cluster.model_copy(update={"nodes": half // 8}))
        assert search(fewer, first_feasible=True).best == []


def test_more_devices_than_a_node_has_are_tried():
    found = {r.change for r in relaxations(search(question(model="llama2-70b", on="2xa100-80g-sxm"), workers=1))}
    assert "16 devices" in found, "one node of eight does not hold the states"
    assert "8 devices" not in found


def test_reasons_are_chains():
    answer = search(question())
    said = {w.what.split(":")[0]: w for w in why_not(answer)}
    assert said["plain plan"].because.startswith("optimizer 50 GiB")
    assert "nearest fix" in said["plain plan"].therefore
    assert "therefore" in str(said["plain plan"])
    off = {c.card.name for c in answer.question.techniques()} - answer.best[0].names
    assert off <= set(said)
    more = FEW | {"flash_attention", "fused_layers"}
    answer = search(question(model="llama3.2-1b", workload=Pretrain(seq_len=4096, batch_size=32), only=more), workers=1)
    step = answer.best[0].metrics["step_time_s"]
    said = {w.what.split(":")[0]: w for w in why_not(answer)}
    grown = [float(s) for w in said.values() for s in re.findall(r"\+([\d.e-]+) s", w.because)]
    assert grown
    assert min(grown) >= 0.001 * step, "nothing is due to what nobody would notice"


def test_reasons_are_of_the_goal_and_of_the_technique_itself():
    """With goal memory it counts what grows, not what takes longer; what no plan can have has its own reason, not that
    of a technique that the best plan does not have either."""
    q = question(
        goal="memory", only=frozenset({"zero", "tensor_parallel", "pipeline", "mixed_precision", "static_memory"})
    )
    answer = search(q, workers=1)
    off = [w for w in why_not(answer) if "best plan is" in w.therefore]
    assert off
    assert all(re.search(r"\+[\d.]+ [MG]iB|nothing gets smaller", w.because) for w in off), off
    alone = {w.what: w.because for w in why_not(answer)}
    assert alone["static_memory"].startswith("on GPUs collectives use memory on streams of their own")


def test_what_a_technique_gains_by_an_option_that_nobody_measured_is_told():
    q = question(on="4xl40s", model="bert-large", workload=Pretrain(seq_len=512, batch_size=16))
    plain, zero_bubble = (
        Tried(e, quick(e, techniques_of(e.plan)), -1.0)
        for plan in (["data_parallel"], ["pipeline:degree=4,schedule=zero_bubble", "mixed_precision"])
        for e in [experiments.make("bert-large", "4xl40s", {"seq_len": 512, "batch_size": 16}, plan)]
    )
    assert zero_bubble.unvalidated == ["pipeline:schedule=zero_bubble"]
    said = _unproven(q, "pipeline", plain, zero_bubble)
    assert said
    assert said.what == "pipeline:schedule=zero_bubble"
    assert "never compared with published measurements, and it gains" in said.because


def test_a_limit_that_nobody_keeps_is_loosened_to_the_nearest():
    w = Generate(batch_size=8, prompt_len=512, output_len=64)
    answer = search(question(workload=w, on="a100-80g-sxm", slo={"tpot_s": 1e-4, "ttft_s": 100.0}))
    assert answer.best == []
    near, misses = closest_miss(answer)
    assert near.quick.fits
    assert misses.startswith("tpot_s")
    first = relaxations(answer)[0]
    name, value = first.change.split("=")
    assert name == "tpot_s"
    kept = search(replace(answer.question, slo={"tpot_s": float(value) * 1.01}))
    assert kept.best


def test_how_far_behind_is_said_only_of_what_was_searched():
    """Beyond the reach of the bounds few plans with a technique are timed, and not the best ones."""
    few = frozenset({"lora", "qlora", "pipeline", "tensor_parallel", "data_parallel", "mixed_precision"})
    q = question(on="4xrtx4090", workload=FineTune(seq_len=350, batch_size=4), only=few)
    answer = search(q, workers=1)
    assert answer.found.counts["bounded"]
    found = [w for w in why_not(answer) if w.what.startswith(("pipeline", "tensor_parallel"))]
    assert found
    for w in found:
        claimed = re.fullmatch(r"its best plan is ([\d.]+)x behind the best plan", w.therefore)
        assert "at least 1.1x behind" in w.therefore or (claimed and float(claimed[1]) <= 1.1)
