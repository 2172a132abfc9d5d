"""Clusters of unequal devices: pipeline stages by speed and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import Graph
from ridgeline.predict import predict
from ridgeline.predict.common import beyond_host
from ridgeline.search import Question
from ridgeline.search.auto.alpa import refiner
from ridgeline.search.auto.explore import descend
from ridgeline.search.auto.points import Simulator, narrowed, point_of
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.workload import Pretrain

UNEQUAL = "8xa100-80g-sxm+8xrtx4090"


def training(on, *plan, model="gpt3-1.3b", **workload):
    fields = {"kind": "pretrain", "seq_len": 1024, "batch_size": 128, "micro_batch_size": 1, **workload}
    return experiments.make(model, on, fields, ["mixed_precision", "flash_attention", *plan])


def test_a_cluster_of_parts():
    c = catalog.cluster("2x8xa100-80g-sxm+1x8xrtx4090")
    assert (c.size, c.label) == (24, "2x8xa100-80g-sxm+8xrtx4090")
    assert [part.device.name for part in c.places(3)] == ["a100-80g-sxm", "a100-80g-sxm", "rtx4090"]
    assert catalog.cluster(c.label) == c
    with pytest.raises(UserError, match="only GPUs can be combined"):
        catalog.cluster("8xa100-80g-sxm+2xxeon")


def test_equal_parts_are_predicted_as_one_cluster():
    plan = ("pipeline:degree=2,schedule=1f1b", "zero:stage=1")
    whole, parts = (predict(training(on, *plan)) for on in ("2x8xa100-80g-sxm", "8xa100-80g-sxm+8xa100-80g-sxm"))
    for name, m in whole.metrics.items():
        assert parts.metrics[name].value == pytest.approx(m.value, rel=2e-3, abs=1e-4), name
    seconds = [{(r.phase, r.operator): r.seconds for r in result.breakdown} for result in (whole, parts)]
    assert seconds[0].keys() == seconds[1].keys()
    for key, s in seconds[0].items():
        assert seconds[1][key] == pytest.approx(s, rel=0.01, abs=1e-4), key


def test_each_stage_takes_as_long_as_its_devices():
    even = predict(training(UNEQUAL, "pipeline:degree=2,layers=12+12"))
    uneven = predict(training(UNEQUAL, "pipeline:degree=2,layers=17+7"))
    assert uneven.metrics["step_time_s"].value < even.metrics["step_time_s"].value
    slow, fast = (predict(training(f"2x8x{name}", "pipeline:degree=2,layers=12+12")).metrics["step_time_s"].value
                  for name in ("rtx4090", "a100-80g-sxm"))  # fmt: skip
    assert fast < even.metrics["step_time_s"].value < 1.01 * slow


def test_memory_is_that_of_the_part_which_is_filled_most():
    large = training(UNEQUAL, "pipeline:degree=2,layers=4+28", "zero:stage=1", model="gpt3-6.7b", batch_size=64)
    small = training(UNEQUAL, "pipeline:degree=2,layers=28+4", "zero:stage=1", model="gpt3-6.7b", batch_size=64)
    over, fits = (predict(e) for e in (large, small))
    assert over.status == "infeasible"
    assert "on rtx4090" in over.reason
    assert fits.status == "ok"


def test_what_cannot_be_is_refused():
    with pytest.raises(Incompatible, match="stages of 6 devices do not lie in parts of 16 and 8"):
        training("2x8xa100-80g-sxm+8xrtx4090", "pipeline:degree=4", batch_size=96)
    with pytest.raises(Incompatible, match="stages of 16 devices"):
        training(UNEQUAL)
    with pytest.raises(Incompatible, match="only train together"):
        experiments.make("gpt2", UNEQUAL, {"kind": "generate"}, [])


def test_the_cut_is_the_best_of_all():
    plan = list(training(UNEQUAL, "pipeline:degree=4", "zero:stage=1", batch_size=64).plan.strings())
    model = catalog.model("gpt3-1.3b").model_copy(update={"num_layers": 12, "published_parameters": None})
    e = experiments.make(model, UNEQUAL, {"kind": "pretrain", "seq_len": 1024, "batch_size": 64,
                                          "micro_batch_size": 1}, plan)  # fmt: skip
    workload = Pretrain(seq_len=1024, batch_size=64)
    simulator = Simulator(narrowed(Question(model, catalog.cluster(UNEQUAL), workload)))
    point = replace(point_of(e), sharding=None)
    made = refiner(point, simulator.base)
    found = made.solve()
    found = descend(found, simulator, 100)
    cuts = [cut for cut in itertools.product(range(1, 10), repeat=4) if sum(cut) == 12]
    best = min(simulator.seconds(replace(point, layers=cut)) for cut in cuts)
    assert simulator.seconds(found) == pytest.approx(best)
    cut = found.cut(made.experiment)
    assert sum(cut[:2]) > sum(cut[2:]), "the faster devices take more layers"


def test_a_saved_plan_finds_its_devices_again(tmp_path):
    slow = catalog.device("a100-80g-sxm").model_copy(update={"name": "slow", "peak_flops": {"bf16": 1e14}})
    (tmp_path / "slow.toml").write_text(catalog.device_toml(slow), encoding="utf-8")
    e = training(f"8xa100-80g-sxm+8x{tmp_path}/slow.toml", "pipeline:degree=2,layers=17+7")
    again = experiments.load(experiments.save(e, tmp_path / "plan" / "found.toml"))
    assert again.cluster == e.cluster
    assert again.plan == e.plan


def test_devices_of_one_name_are_saved_apart_and_found_from_anywhere(tmp_path, monkeypatch):
    for folder, flops in (("a", 1e14), ("b", 2e14)):
        gpu = catalog.device("a100-80g-sxm").model_copy(update={"name": "mygpu", "peak_flops": {"bf16": flops}})
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mygpu.toml").write_text(catalog.device_toml(gpu), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    e = training("8xa/mygpu.toml+8xb/mygpu.toml", "pipeline:degree=2,layers=17+7")
    plans = ("plans/found.toml", "plans/found.toml", "named/mygpu.toml")
    files = [experiments.save(e, Path(plan)).resolve() for plan in plans]
    assert sorted(f.name for f in Path("plans").iterdir()) == ["found.toml", "mygpu-2.toml", "mygpu.toml"]
    monkeypatch.chdir("a")
    assert [experiments.load(file).cluster for file in files] == [e.cluster] * 3
    one = experiments.make("gpt2", "2x../b/mygpu.toml", {"kind": "generate"}, ["tensor_parallel:degree=2"])
    for plan in (e, one):
        assert experiments.load(experiments.save(plan, tmp_path / "c++" / "a+b" / "found.toml")).cluster == plan.cluster


@pytest.mark.parametrize("on", [UNEQUAL, "8xrtx4090+8xa100-80g-sxm"])
def test_the_host_memory_of_every_part_counts(on):
    cluster = catalog.cluster(on)
    short = beyond_host(Graph([], host_bytes=60 * 2**30), cluster)
    assert "480.0 GiB of host memory per node, which has 476.8 GiB" in short
    assert beyond_host(Graph([], host_bytes=59 * 2**30), cluster) == ""
