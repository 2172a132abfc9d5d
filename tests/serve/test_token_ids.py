"""Tokens by their ids, and log-probabilities of prompts: vLLM's additions to completions and chats."""

import json
import math

import pytest
import torch
from tests.serve.test_reliability import call, error
from tests.serve.test_tools import ROME, TOOLS, tools  # noqa: F401 (a fixture)

PROMPT = "The cat"
CHAT = [{"role": "user", "content": PROMPT}]
BOTH = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}


def answer(server, path, **more):
    body = {**BOTH[path], "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    status, _, text = call(server, path, body)
    assert status == 200, text
    if not more.get("stream"):
        return json.loads(text)
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", BOTH)
def test_tokens_by_their_ids(server, path):
    whole = answer(server, path, return_token_ids=True)
    chat = "messages" in BOTH[path]
    choice = whole["choices"][0]
    prompt = whole["prompt_token_ids"] if chat else choice["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert server.service.vocabulary.decode(prompt).strip().startswith("<user>" if chat else PROMPT)
    assert len(choice["token_ids"]) == 6
    text = choice["message"]["content"] if chat else choice["text"]
    assert server.service.vocabulary.decode(choice["token_ids"]) == text
    chunks = answer(server, path, return_token_ids=True, stream=True)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == choice["token_ids"]
    firsts = [c if chat else c["choices"][0] for c in chunks]
    assert [f["prompt_token_ids"] for f in firsts if "prompt_token_ids" in f] == [prompt]
    without = answer(server, path)
    holder = without if chat else without["choices"][0]
    assert without["choices"][0]["token_ids"] is None
    assert holder["prompt_token_ids"] is holder["prompt_logprobs"] is None


def test_the_token_that_ends_an_output_is_one(server):
    first = answer(server, "/v1/completions", return_token_ids=True)["choices"][0]["token_ids"]
    cut = answer(server, "/v1/completions", return_token_ids=True, stop_token_ids=[first[2]])["choices"][0]
    assert cut["token_ids"] == first[: first.index(first[2]) + 1]
    assert cut["text"] == server.service.vocabulary.decode(cut["token_ids"][:-1])


def test_tokens_of_calls(server, tools):  # noqa: F811
    tools(text=f"<tool_call>{ROME}</tool_call>")
    more = {"tools": TOOLS, "max_tokens": 120, "return_token_ids": True, "ignore_eos": None}
    whole = answer(server, "/v1/chat/completions", **more)["choices"][0]["token_ids"]
    chunks = answer(server, "/v1/chat/completions", stream=True, **more)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == whole
    assert server.service.vocabulary.decode(whole) == f"<tool_call>{ROME}</tool_call>"


def test_log_probabilities_by_ids(server):
    table = answer(server, "/v1/completions", logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = table["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    chat = answer(server, "/v1/chat/completions", logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = chat["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_the_prompt(server, path, count):
    found = answer(server, path, prompt_logprobs=count, return_token_ids=True)
    holder = found if "messages" in BOTH[path] else found["choices"][0]
    prompt, rows = holder["prompt_token_ids"], holder["prompt_logprobs"]
    with torch.inference_mode():
        expected = server.engine.model(torch.tensor([prompt]))[0].log_softmax(-1)
    assert rows[0] is None
    assert len(rows) == len(prompt)
    for at, (token, row) in enumerate(zip(prompt[1:], rows[1:], strict=True)):
        own = row[str(token)]
        assert own["logprob"] == pytest.approx(float(expected[at, token]), abs=1e-3)
        assert own["rank"] == 1 + int((expected[at] > expected[at, token] + 1e-6).sum())
        assert own["decoded_token"] == server.service.vocabulary.name(token)
        best = expected[at].topk(max(1, count)).indices.tolist()[:count]
        assert set(row) == {str(token), *map(str, best)}
        assert sorted(e["rank"] for t, e in row.items() if int(t) in best) == list(range(1, count + 1))


def test_an_echo_has_its_own_number(server):
    both = answer(server, "/v1/completions", echo=True, logprobs=1, prompt_logprobs=4)["choices"][0]
    assert all(len(top) <= 2 for top in both["logprobs"]["top_logprobs"][1:])
    assert all(4 <= len(row) <= 5 for row in both["prompt_logprobs"][1:])
    alone = answer(server, "/v1/completions", echo=True, logprobs=1)["choices"][0]
    assert alone["logprobs"] == both["logprobs"]


@pytest.mark.parametrize("more", [
    {"stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"use_beam_search": True}, {"best_of": 2}
])  # fmt: skip
def test_prompts_that_have_none(server, more):
    status, _, text = call(server, "/v1/completions", {"prompt": "a", "max_tokens": 2, "prompt_logprobs": 1, **more})
    assert (status, error(text)["param"]) == (400, "prompt_logprobs"), text


@pytest.mark.parametrize("path", BOTH)
def test_log_probabilities_of_the_whole_vocabulary(server, monkeypatch, path):
    monkeypatch.setattr(server.service, "max_logprobs", -1)
    size = server.service.vocab_size
    whole = answer(server, path, prompt_logprobs=-1)
    chat = "messages" in BOTH[path]
    rows = (whole if chat else whole["choices"][0])["prompt_logprobs"]
    assert rows[0] is None
    assert all(len(row) == size for row in rows[1:])
    assert all(sum(math.exp(e["logprob"]) for e in row.values()) == pytest.approx(1) for row in rows[1:])
    asked = {"logprobs": True, "top_logprobs": -1} if chat else {"logprobs": -1}
    entries = answer(server, path, **asked)["choices"][0]["logprobs"]
    tops = [e["top_logprobs"] for e in entries["content"]] if chat else entries["top_logprobs"]
    assert len(tops) == 6
    if chat:  # names are keys in completions, and some tokens have the same
        assert all(len(top) == size for top in tops)


@pytest.mark.parametrize(("most", "asked", "fine"), [(20, 20, True), (20, 21, False), (20, -1, False), (0, 1, False),
                                                     (30, 30, True), (-1, 257, True)])  # fmt: skip
def test_the_server_bounds_log_probabilities(server, monkeypatch, most, asked, fine):
    monkeypatch.setattr(server.service, "max_logprobs", most)
    for path, more in (("/v1/completions", {"logprobs": asked}), ("/v1/completions", {"prompt_logprobs": asked}),
                       ("/v1/chat/completions", {"logprobs": True, "top_logprobs": asked})):  # fmt: skip
        got = call(server, path, {**BOTH[path], "max_tokens": 1, **more})
        assert got[0] == (200 if fine else 400), got
        if not fine:
            assert f"of {most} at most" in error(got[2])["message"]


@pytest.mark.parametrize("path", BOTH)
def test_usage_in_every_chunk(server, monkeypatch, path):
    monkeypatch.setattr(server.service, "force_usage", True)
    chunks = answer(server, path, stream=True)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert chunks[-1]["choices"] == []
