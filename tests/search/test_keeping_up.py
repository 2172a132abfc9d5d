"""Serving at a stated rate: the cheapest engine is one that answers requests as fast as they arrive."""

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.search import Question, search
from ridgeline.search.answer_tables import answer_tables, trade
from ridgeline.search.why import why_not

LOAD = {"kind": "serve", "engine": "vllm", "rate": 2.0, "requests": 200, "prompt_len": 2000, "output_len": 200}


def question(on, goal="cost", **load):
    e = experiments.make("llama2-13b", on, {**LOAD, **load}, [])
    return Question(e.model, e.cluster, e.workload, goal, only=frozenset({"tensor_parallel"}))


def test_the_cheapest_keeps_up_with_the_arrivals():
    """One that never idles, as its queue grows without end, has the least cost per token."""
    q = question("4xa800-80g")
    best, *_ = search(q, workers=1).best
    assert q.keeps_up(best.metrics)
    assert best.metrics["ttft_s"] < 1
    assert best.experiment.cluster.size > 1
    alone = predict(experiments.make("llama2-13b", "a800-80g", LOAD, [])).metrics
    assert alone["dollars_per_million_tokens"].value < best.metrics["dollars_per_million_tokens"]
    assert not q.keeps_up({name: m.value for name, m in alone.items()})


@pytest.mark.parametrize("goal", ["cost", "throughput"])
def test_an_answer_that_does_not_keep_up_says_so(goal):
    notes = answer_tables(search(question("1xa800-80g", goal), workers=1))[0].notes
    assert [n for n in notes if n.startswith("plan 1 does not keep up with the arrivals: it answers")]
    notes = answer_tables(search(question("1xa800-80g", goal, rate=0.2), workers=1))[0].notes
    assert not [n for n in notes if "keep up" in n]


def test_answers_per_arrival_tell_whether_the_queue_grows():
    def share(rate):
        return predict(experiments.make("llama2-13b", "a800-80g", {**LOAD, "rate": rate}, [])).metrics["answered_share"]

    shares = [share(rate).value for rate in (0.2, 2.0, 20.0)]
    assert shares[0] == pytest.approx(1, abs=0.02)
    assert shares[0] > 1.2 * shares[1] > 1.5 * shares[2]


def test_a_closed_loop_has_no_arrivals_to_keep_up_with():
    load = {name: value for name, value in LOAD.items() if name != "rate"} | {"concurrency": 8}
    assert "answered_share" not in predict(experiments.make("llama2-13b", "a800-80g", load, [])).metrics


@pytest.mark.parametrize("length_cv", [0.0, 1.0])
def test_answers_that_take_as_long_as_the_load_do_not_tell_that_a_queue_grows(length_cv):
    """Nobody waits: but half of the requests are under way when the last one arrives."""
    load = {"rate": 10.0, "prompt_len": 50, "output_len": 1000, "length_cv": length_cv}
    found = predict(experiments.make("llama2-7b", "a800-80g", {**LOAD, **load}, [])).metrics
    metrics = {name: m.value for name, m in found.items()}
    assert metrics["ttft_s"] < 0.1
    assert metrics["requests_per_s"] < 0.8 * load["rate"]
    assert question("1xa800-80g", **load).keeps_up(metrics)


def test_a_short_trace_at_a_rate_is_judged_by_its_own_requests(tmp_path):
    """A tenth of the default number of requests, most of which wait."""
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": {1000 * i}, "input_length": 2000, "output_length": 200}}\n' for i in range(100)]
    trace.write_text("".join(lines))
    load = {**LOAD, "trace": str(trace), "requests": None}
    for rate, keeps_up in ((0.5, True), (3.0, False)):
        e = experiments.make("llama2-13b", "a800-80g", {**load, "rate": rate}, [])
        metrics = {name: m.value for name, m in predict(e).metrics.items()}
        assert question("1xa800-80g", **load | {"rate": rate}).keeps_up(metrics) == keeps_up
    # So few differ by chance by more than the tenth that is allowed anyway.
    found = [
        question("1xa800-80g", **load).keeps_up({"requests_per_s": 1.0, "answered_share": s}) for s in (0.85, 0.75)
    ]
    assert found == [True, False]


def test_requests_that_arrive_at_once_are_ranked_by_how_fast_they_are_answered(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "input_length": 2000, "output_length": 200}\n' * 20)
    q = question("1xa800-80g", "throughput", trace=str(trace), rate=None, requests=None)
    metrics = {"requests_per_s": 3.0, "tokens_per_s": 600.0}
    assert q.offered is None
    assert q.keeps_up(metrics)
    assert q.rank(metrics) == -600


@pytest.mark.parametrize(("apart", "keeps_up"), [(2000, True), (300, False)])
def test_a_trace_has_a_rate_of_its_own(tmp_path, apart, keeps_up):
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": {apart * i}, "input_length": 2000, "output_length": 200}}\n' for i in range(100)]
    trace.write_text("".join(lines))
    q = question("1xa800-80g", trace=str(trace), rate=None, requests=None)
    answer = search(q, workers=1)
    assert q.offered == pytest.approx(1000 / apart)
    assert q.keeps_up(answer.best[0].metrics) == keeps_up
    assert any("does not keep up" in note for note in answer_tables(answer)[0].notes) != keeps_up


def test_why_a_technique_is_out_is_no_factor_of_the_rank():
    """What does not keep up is not a thousand times as expensive."""
    e = experiments.make("llama2-13b", "2xa800-80g", {**LOAD, "rate": 3.0}, [])
    few = frozenset({"tensor_parallel", "pipeline"})
    a = search(Question(e.model, e.cluster, e.workload, "cost", only=few), workers=1)
    assert a.question.keeps_up(a.best[0].metrics)
    assert not a.question.keeps_up(a.found.with_technique["pipeline"].metrics)
    why = next(w for w in why_not(a) if w.what.startswith("pipeline"))
    assert why.therefore == "its best plan does not keep up with the arrivals"


def test_plans_that_keep_up_on_the_same_devices_cost_the_same_and_the_faster_is_first():
    """When the last answer ends is chance; before, it decided between them."""
    load = {"engine": "", "rate": 4.0, "prompt_len": 1024, "output_len": 256}
    usual = ["tensor_parallel:degree=4", "continuous_batching", "padding_free"]
    q, found = question("4xa100-80g-sxm", **load), []
    for plan in (usual, [*usual, "flash_attention"]):
        r = predict(experiments.make("llama2-13b", "4xa100-80g-sxm", {**LOAD, **load}, plan))
        found.append({name: m.value for name, m in r.metrics.items()})
    assert all(map(q.keeps_up, found))
    assert len({q.rank(m) for m in found}) == 1
    assert len({m["tokens_per_s"] for m in found}) == 2
    assert found[1]["e2e_s"] < found[0]["e2e_s"]
    only = frozenset({"tensor_parallel", "continuous_batching", "padding_free", "flash_attention"})
    asked = Question(q.model, q.cluster, q.workload, "cost", only=only)
    assert "flash_attention" in search(asked, workers=1).best[0].names


def test_alternatives_that_cost_the_same_are_not_told_to_be_cheaper_or_more_expensive():
    load = {"engine": "", "rate": 4.0, "prompt_len": 1024, "output_len": 256}
    e = experiments.make("llama2-13b", "2xa100-80g-sxm", {**LOAD, **load}, ["continuous_batching", "padding_free"])
    q = Question(e.model, e.cluster, e.workload, "cost", fixed=e.plan, only=frozenset({"tensor_parallel"}))
    first, other = search(q, workers=1).best
    assert not other.kind, "replicas"
    assert abs(other.metrics[q.metric] / first.metrics[q.metric] - 1) > 0.03
    assert "expensive" not in trade(other, first, q.metric)
    assert "cheaper" not in trade(other, first, q.metric)
    assert "TTFT" in trade(other, first, q.metric)


@pytest.mark.parametrize("goal", ["cost", "throughput"])
def test_replicas_are_ranked_by_the_answers_of_a_whole_trace(goal, tmp_path):
    """Not by those of the one that is simulated: every second answer is short."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {1000 * i}, "input_length": 500, "output_length": {300 - 200 * (i % 2)}}}\n'
        for i in range(100)
    ]
    trace.write_text("".join(lines))
    load = {"trace": str(trace), "rate": 2.0, "requests": None}
    q, found = question("2xa800-80g", goal, **load), []
    for plan in ([], ["tensor_parallel:degree=2"]):
        r = predict(experiments.make("llama2-13b", "2xa800-80g", {**LOAD, **load}, plan))
        found.append({name: m.value for name, m in r.metrics.items()})
    assert all(map(q.keeps_up, found))
    assert found[0]["tokens_per_s"] > 1.2 * found[1]["tokens_per_s"]
    assert q.rank(found[0]) == q.rank(found[1])
