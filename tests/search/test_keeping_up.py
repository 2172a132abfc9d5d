"""Serving at a stated rate: the cheapest engine is one that answers requests as fast as they arrive."""

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.search import Question, search
from ridgeline.search.answer_tables import answer_tables

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
