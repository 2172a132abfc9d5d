"""What `plan` writes is what `predict` reads: the same metrics, for every task and goal, and no plan twice."""

from itertools import pairwise

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.report.console import SearchBar
from ridgeline.search import Question, search
from ridgeline.search.answer_tables import answer_tables, shown_front, trade, write_plans
from ridgeline.search.found import ALIKE

FEW = frozenset({"zero", "recompute", "lora", "mixed_precision", "data_parallel", "tensor_parallel", "rtn"})
SMALL = {"kind": "pretrain", "seq_len": 512, "batch_size": 16}


@pytest.mark.parametrize(
    ("model", "on", "workload", "goal"),
    [
        ("llama2-7b", "8xa100-80g-sxm", SMALL, "throughput"),
        ("llama2-7b", "2xrtx4090", {**SMALL, "kind": "finetune"}, "memory"),
        ("mixtral-tiny", "2x2xh100-sxm", SMALL, "cost"),
        ("llama2-13b", "2xh100-sxm", {"kind": "generate", "prompt_len": 128, "output_len": 32}, "throughput"),
        ("llama2-13b", "2xh100-sxm", {"kind": "serve", "requests": 20, "rate": 2.0}, "latency"),
        ({"base": "llama2-7b", "num_layers": 4, "name": "short"}, "2xl40s", SMALL, "latency"),
    ],
)
def test_files_predict_what_was_promised(model, on, workload, goal, tmp_path):
    e = experiments.make(model, on, workload, [])
    free = workload["kind"] == "generate"
    allow = FEW if e.is_training else frozenset()
    answer = search(Question(e.model, catalog.cluster(on), e.workload, goal, only=allow, free_batch=free), workers=1)
    files = write_plans(answer, tmp_path)
    assert len(files) == len(answer.best) > 0
    plans = set()
    for file, found in zip(files, answer.best, strict=True):
        read = experiments.load(file)
        assert read.id == found.experiment.id
        plans.add((read.id, read.micro_batch_size, read.cluster.label))
        metrics = predict(read).metrics
        for name, value in found.metrics.items():
            assert metrics[name].value == pytest.approx(getattr(value, "value", value), rel=1e-9), name
    assert len(plans) == len(files)


def test_serving_plans_split_what_one_device_cannot_hold():
    e = experiments.make("llama2-70b", "4xh100-sxm", {"kind": "serve", "requests": 20, "rate": 2.0}, [])
    answer = search(Question(e.model, e.cluster, e.workload, "latency"), workers=1)
    best = answer.best[0].experiment
    assert best.parallel.get("tp", 1) > 1


def test_least_memory_is_found_among_the_smallest_micro_batches():
    e = experiments.make("llama2-7b", "4xa100-80g-sxm", SMALL, [])
    few = FEW - {"lora", "rtn"}
    pruned = search(Question(e.model, e.cluster, e.workload, "memory", only=few), workers=1)
    limit = {"step_time_s": 1e9}  # a limit that all keep: every micro-batch is tried
    whole = search(Question(e.model, e.cluster, e.workload, "memory", slo=limit, only=few), workers=1)
    assert pruned.found.counts["dominated"] > 0
    assert pruned.best[0].metrics["peak_bytes"] == whole.best[0].metrics["peak_bytes"]


def test_the_least_memory_leaves_no_layer_on_the_device():
    workload = {"kind": "generate", "prompt_len": 128, "output_len": 32}
    e = experiments.make("llama2-7b", "rtx4090", workload, [])
    only = frozenset({"zero_inference", "flash_attention"})
    best = search(Question(e.model, e.cluster, e.workload, "memory", only=only), workers=1).best[0]
    assert best.experiment.plan.option("zero_inference", "resident") == 0
    layer = 2 * e.model.num_parameters / e.model.num_layers
    assert best.metrics["peak_bytes"] < 6 * layer


def test_the_front_that_is_shown_has_no_plans_that_are_alike():
    """Offloading the states of an adapter, or another micro-batch, is no trade."""
    e = experiments.make("llama2-7b", "8xrtx3090", {"kind": "finetune", "seq_len": 350, "batch_size": 8}, [])
    a = search(Question(e.model, e.cluster, e.workload, allow=frozenset({"lora"})), workers=1)
    shown = shown_front(a.found.front)
    assert 1 < len(shown) < len(a.found.front)
    assert shown[-1] is min(a.found.front, key=lambda t: t.rank)
    gaps = [(better.over - t.over, better.rank < t.rank) for t, better in pairwise(shown)]
    assert all(gap >= ALIKE and ahead for gap, ahead in gaps)
    assert len(answer_tables(a)[1].rows) == len(shown)


def test_the_trade_of_a_dearer_plan_says_how_fast_it_is():
    """One device that takes five times as long for a little more money."""
    e = experiments.make("llama3.1-8b", "4xh100-sxm", {"kind": "finetune", "seq_len": 2048, "batch_size": 16}, [])
    few = frozenset({"zero", "zero_offload", "mixed_precision", "flash_attention"})
    q = Question(e.model, e.cluster, e.workload, "cost", only=few)
    first, *others = search(q, workers=1).best
    others = [t for t in others if t.experiment.cluster.size != first.experiment.cluster.size]
    assert others
    for t in others:
        speed = t.metrics["tokens_per_s"] / first.metrics["tokens_per_s"]
        assert f"more expensive, {speed:.2g}x as fast" in trade(t, first, q.metric)


def test_the_end_is_said_though_one_worker_was_done_before_another_said_its_number(capfd):
    with SearchBar("planning") as bar:
        for done, of in [(0, 0), (40, 80), (80, 80), (81, 160), (160, 160)]:
            bar.at(done, of)
        for done, of in [(240, 240), (240, 240)]:  # a third, all at once
            bar.at(done, of)
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == ["40", "80", "160", "240"]


def test_progress_counts_what_all_workers_have_done(capfd):
    e = experiments.make("llama2-7b", "8xa100-80g-sxm", SMALL, [])
    question, seen = Question(e.model, e.cluster, e.workload, "throughput", only=FEW), []
    with SearchBar("planning") as bar:
        search(question, 2, lambda done, of: (seen.append((done, of)), bar.at(done, of)))
    done, of = seen[-1]
    assert seen == sorted(seen)
    assert done == of > 16
    assert f"planning: {of} of {of}" in capfd.readouterr().err
