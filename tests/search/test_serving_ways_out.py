"""Ways out of questions without an answer, and reasons, of serving."""

from ridgeline import catalog
from ridgeline.search import Question, search
from ridgeline.search.why import relaxations, why_not
from ridgeline.spec.workload import Serve


def test_what_no_request_could_keep_is_not_searched_under_load(monkeypatch):
    """A limit below what one request alone takes: steps of the ladders are asked of that one request."""
    q = Question(catalog.model("llama3.1-8b"), catalog.cluster("1xrtx4090"), Serve(requests=40, rate=1.0),
                 slo={"ttft_s": 1e-4}, only=frozenset({"tensor_parallel"}))  # fmt: skip
    answer, asked = search(q, workers=1), []

    def spy(question, **options):
        asked.append(question.workload.requests)
        return search(question, **options)

    monkeypatch.setattr("ridgeline.search.why.search", spy)
    assert [r.change.partition("=")[0] for r in relaxations(answer)] == ["ttft_s"]
    assert set(asked) == {1}


def test_a_limit_that_more_devices_keep_is_found_under_load():
    only = frozenset({"tensor_parallel", "continuous_batching", "padding_free"})
    work = Serve(requests=20, rate=1.0)
    q = Question(catalog.model("llama3.1-8b"), catalog.cluster("1xh100-sxm"), work, slo={"tpot_s": 5e-3}, only=only)
    ways = relaxations(search(q, workers=1))
    assert any(r.change == "2 devices" and "tensor_parallel:degree=2" in r.plan for r in ways)


def test_what_needs_several_devices_says_so():
    q = Question(catalog.model("mixtral-8x7b"), catalog.cluster("1xh200-sxm"), Serve(requests=4, rate=1.0))
    found = {w.what: w.because for w in why_not(search(q, workers=1))}
    for name in ("expert_parallel", "tensor_parallel", "pipeline"):
        assert found[name] == "it needs 2 devices or more"


def test_a_limit_that_is_missed_on_the_devices_is_not_tried_from_host_memory():
    only = frozenset({"tensor_parallel", "zero_inference"})
    work = Serve(requests=4, rate=1.0)
    q = Question(catalog.model("llama2-7b"), catalog.cluster("2xrtx4090"), work, slo={"ttft_s": 1e-4}, only=only)
    answer = search(q, workers=1)
    assert not answer.best
    assert answer.found.counts["missed"] > 0
    assert not any("zero_inference" in t.names for t in answer.found.nearest)
