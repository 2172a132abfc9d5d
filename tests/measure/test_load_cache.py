"""A load must not measure the server's prefix cache: against the real server, which has one."""

import json
import statistics
import sys

import pytest

pytest.importorskip("fastapi")

from tests.serve.running import running, tiny

from ridgeline import cli
from ridgeline.data.batches import train_tokenizer
from ridgeline.measure.load.ask import make_prompts
from ridgeline.measure.load.drive import Drive
from ridgeline.measure.load.endpoint import find_endpoint
from ridgeline.measure.load.prompts import Characters, RandomIds, TextIds
from ridgeline.measure.load.record import Record
from ridgeline.measure.load.run_load import Settings, measure_load
from ridgeline.measure.load.summary import summarize
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve

CHECK = "the workload explains the cached prompts"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tiny(tmp_path_factory.mktemp("served") / "tiny")) as s:
        yield s


@pytest.fixture
def load(server, monkeypatch, capsys):
    def _run(*options):
        args = ["load", server.url, "--requests", "8", "--input-len", "64", "--output-len", "2", "--json", *options]
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        found = json.loads(out)
        return [Result.model_validate(r) for r in (found if isinstance(found, list) else [found])]

    return _run


def explained(result):
    return next(c for c in result.checks if c.name == CHECK)


def test_neither_a_later_rate_nor_a_later_run_finds_its_prompts_in_the_cache(load):
    for _ in range(2):
        for result in load("--rate", "100,200,300"):
            assert result.metric("cached_share") == 0
            assert explained(result).passed


def test_a_run_that_is_sent_again_fails_its_check(load):
    (first,) = load("--rate", "100")
    (again,) = load("--rate", "100", "--run", str(first.environment["run"]))
    assert again.metric("cached_share") > 0.5
    check = explained(again)
    assert not check.passed
    assert check.got == again.metric("cached_share") > check.expected
    assert any("prefix cache" in note for note in again.notes)


def test_a_shared_beginning_is_explained(load):
    (result,) = load("--rate", "100", "--shared-prefix", "48")
    assert result.metric("cached_share") == pytest.approx(48 / 64)
    assert explained(result).passed


def test_what_a_chat_template_adds_is_found_by_the_first_request(server):
    endpoint = find_endpoint(server.url, api="chat")
    prompts, _ = make_prompts("chat", None, None, 256, 0, 0)
    result, d = measure_load(endpoint, Serve(rate=100, requests=4, prompt_len=16, output_len=2), prompts, Settings())
    around = server.service.vocabulary.encode("<user>\n<assistant>", special=False)
    assert len(around) <= d.template <= len(around) + 3  # a token of the load is four characters
    assert explained(result).passed


@pytest.mark.parametrize(("template", "passed"), [(40, True), (0, False)])
def test_only_what_the_template_adds_may_be_cached(template, passed):
    made = [Record(i, 0.0, 60, 2, sent=0.0, chunks=[0.1], end=0.2, prompt_tokens=100, output_tokens=2, cached_tokens=40,
                   finish="length") for i in range(3)]  # fmt: skip
    empty = Result(source="measured", experiment_id="x", name="x", experiment={}, environment={}, created="")
    result = summarize(Drive(made, 0.0, 1.0, template=template), Serve(rate=1.0, prompt_len=60, output_len=2), empty)
    assert explained(result).passed == passed


TEXT = (statistics.__doc__ or "")[:1200]
TOKENIZER = train_tokenizer([TEXT], 300)


@pytest.mark.parametrize(
    "kind",
    [lambda seed, run: RandomIds(1000, seed, 8, run), lambda seed, run: TextIds(TEXT, TOKENIZER, False, seed, 8, run),
     lambda seed, run: Characters(TEXT, seed, 2, run)],
)  # fmt: skip
def test_prompts_are_a_function_of_seed_run_rate_and_index(kind):
    """Also prompts that are as long as the text that they are cut from."""
    made = kind(1, 2).at_rate(3)
    prompt = made.make(4, 300)
    assert prompt == kind(1, 2).at_rate(3).make(4, 300)
    others = [kind(5, 2).at_rate(3), kind(1, 5).at_rate(3), kind(1, 2).at_rate(5)]
    others = [*(p.make(4, 300) for p in others), made.make(5, 300), made.make(-1, 300)]
    assert len({tuple(p[8:20]) for p in [prompt, *others]}) == 6
    assert all(p[:8] == prompt[:8] for p in others[1:]), "what is shared is shared by all runs of a seed"


def test_thoughts_are_text_whatever_the_server_calls_them():
    for name in ("content", "reasoning_content", "reasoning"):
        record = Record(0, 0.0, 1, 1)
        chunk = {"choices": [{"index": 0, "delta": {"content": None, name: "hm"}, "finish_reason": None}]}
        record.event(json.dumps(chunk).encode(), 1.0)
        assert record.chunks == [1.0], name
