"""Reasoning apart from answers: whole, streamed, before calls, and back again."""

import json
import re
from types import SimpleNamespace

import openai
import pytest
from tests.serve.test_responses import both as responses
from tests.serve.test_tools import ASK, CALLED, FORMATS, ROME, TOOLS, both, said, tools  # noqa: F401 (a fixture)

from ridgeline.data.examples import Template
from ridgeline.serve.checkpoint_settings import Options
from ridgeline.serve.harmony import ChannelCount, ChannelReader
from ridgeline.serve.reasoning import Reasoned, ReasoningCount, ReasoningGrammar
from ridgeline.serve.response_bodies import ResponseRequest
from ridgeline.serve.tool_calls import Calls, id_maker
from ridgeline.spec.errors import UserError

OPEN = "{{ messages[0].content }}{{ tools and '' }}<think>\n"
CLOSED = "{{ messages[0].content }}{{ tools and '' }}<think>\n\n</think>\n\n"
PLAIN = "{{ messages[0].content }}{{ tools and '' }}"
TEXTS = [
    (PLAIN, "<think>\nSo: <b> x.\n</think>\n\nHello", "So: <b> x.", "Hello"),
    (OPEN, "So: x.\n</think>\n\nHello", "So: x.", "Hello"),
    (OPEN, "<think>So</think>Hello", "So", "Hello"),
    (PLAIN, "Hello <think>", None, "Hello <think>"),
    (CLOSED, "Hello", None, "Hello"),
]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture
def reasons(server, monkeypatch, tools):  # noqa: F811
    def use(source, text):
        tools("hermes", text, source)
        monkeypatch.setattr(server.service, "reasons", True)
        plain = type(server.service)._begun
        # the grammar that makes the model write this text is none that a client asked for
        monkeypatch.setattr(
            type(server.service),
            "_begun",
            lambda service, prompt, structure: plain(service, prompt, False),
        )
        monkeypatch.setattr(type(server.service), "_with_reasoning", lambda service, sampling, *_: sampling)

    return use


@pytest.mark.parametrize(("source", "text", "reasoning", "answer"), TEXTS)
def test_reasoning_is_told_apart(client, reasons, source, text, reasoning, answer):
    reasons(source, text)
    options = {"model": "tiny", "messages": ASK, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0]
    assert (whole.message.content, getattr(whole.message, "reasoning", None)) == (answer, reasoning)
    assert getattr(whole.message, "reasoning_content", None) == reasoning
    deltas = [c.choices[0].delta for c in client.chat.completions.create(stream=True, **options)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == (reasoning or "")
    assert "".join(d.content or "" for d in deltas) == answer


@pytest.mark.parametrize("source", [PLAIN, OPEN])
def test_calls_follow_reasoning(client, reasons, source):
    reasons(source, f"<think>It asks for <tool_call>.</think>\n<tool_call>{ROME}</tool_call>")
    whole, streamed = both(client, max_tokens=150)
    assert said(whole) == said(streamed) == ("", CALLED[:1], "tool_calls")
    assert whole.message.reasoning == "It asks for <tool_call>."


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(("source", "text", "reasoning", "answer"), TEXTS)
def test_how_the_text_is_cut_makes_no_difference(step, source, text, reasoning, answer):
    reader = Reasoned(source is OPEN, Calls(FORMATS["hermes"], id_maker(0)))
    pieces = [p for at in range(0, len(text), step) for p in reader.push(text[at : at + step])]
    pieces += reader.push("", last=True)
    assert "".join(p.reasoning for p in pieces) == (reasoning or "")
    assert "".join(p.text for p in pieces) == answer


def test_reasoning_without_an_end_is_all_there_is(client, reasons):
    reasons(OPEN, "So: x")
    message = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=60).choices[0].message
    assert (message.content, message.reasoning) == (None, "So: x")


def test_reasoning_is_an_item_of_responses(client, server, reasons):
    reasons(PLAIN, TEXTS[0][1])
    whole, _ = responses(client, input="Hi", max_output_tokens=60, extra_body={})
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("So: <b> x.", "Hello")
    sent = [{"role": "user", "content": "Hi"}, *(i.model_dump(exclude_none=True) for i in whole.output)]
    messages = ResponseRequest.model_validate(json.loads(json.dumps({"input": sent}))).messages()
    assert [(m.role, m.content, m.reasoning_content) for m in messages] == [
        ("user", "Hi", None), ("assistant", "Hello", "So: <b> x."),
    ]  # fmt: skip


def test_options():
    with pytest.raises(UserError, match="qwen3"):
        Options(reasoning_parser="qwen").check()


@pytest.mark.parametrize(("begun", "text", "count"), [
    (False, "<think>ab</think>cd", 2), (True, "ab</think>cd", 2), (True, "<think>ab</think>cd", 2), (False, "ab", 0),
    (False, " <think>abc", 3), (True, "abc", 3), (False, "a<think>b</think>", 0), (False, "<think></think>a", 0),
])  # fmt: skip
def test_tokens_of_reasoning_are_counted(server, begun, text, count):
    vocabulary = server.service.vocabulary
    counter = ReasoningCount(vocabulary, begun)
    for token in vocabulary.encode(text, special=False):  # a token is a byte
        counter.push([token])
    assert counter.tokens == count


@pytest.mark.parametrize(("header", "count"), [
    ("<|channel|>analysis", 2), ("<|channel|>final", 0), ("<|channel|>analysis to=functions.f", 0),
    ("<|start|>assistant to=functions.f<|channel|>analysis", 0), ("<|start|>assistant<|channel|>analysis code", 2),
])  # fmt: skip
def test_tokens_in_the_channel_of_reasoning_are_counted(header, count):
    """As the reader tells them apart: what is said to a function is none."""
    parts = [*re.split(r"(<\|\w+\|>)", header), "<|message|>", "a", "b", "<|end|>", "c"]
    vocabulary = SimpleNamespace(bytes=[p.encode() for p in parts])
    counter = ChannelCount(vocabulary)
    counter.push(range(len(parts)))
    assert counter.tokens == count
    assert len("".join(p.reasoning for p in ChannelReader(lambda: "").push("".join(parts)))) == count


def test_usage_counts_reasoning_that_is_hidden_too(client, reasons):
    reasons("{{ messages[0].content }}", "<think>\nSo.\n</think>\n\nYes")
    options = {"model": "tiny", "messages": ASK, "max_tokens": 60, "temperature": 0}
    for shown in (True, False):
        made = client.chat.completions.create(**options, extra_body={"include_reasoning": shown})
        assert made.choices[0].message.content == "Yes"
        assert getattr(made.choices[0].message, "reasoning", None) == ("So." if shown else None)
        assert made.usage.completion_tokens_details.reasoning_tokens == len("\nSo.\n")
        chunks = list(client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_body={"include_reasoning": shown}
        ))  # fmt: skip
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len("\nSo.\n")
        said = [getattr(c.choices[0].delta, "reasoning", None) for c in chunks if c.choices]
        assert "".join(s for s in said if s) == ("So." if shown else "")
    made = client.responses.create(model="tiny", input="Hi", max_output_tokens=60, temperature=0)
    assert made.usage.output_tokens_details.reasoning_tokens == len("\nSo.\n")


BEGIN, END = (1, 2), (3, 4)
BYTES = [b"x", b"<th", b"ink>", b"</th", b"ink>", *[b"x"] * 5, b"</", b"think", b">\n"]


def written(budget, thinking, wishes):
    """Tokens that a model writes which ``wishes`` for these, where nothing is due."""
    limit, out = ReasoningGrammar(BYTES, BEGIN, END, thinking, budget), []
    for wish in wishes:
        due = limit.fork().allowed()
        assert due == limit.allowed()
        out.append(wish if due is None else due[0])
        limit.accept(out[-1])
    return out


@pytest.mark.parametrize(("budget", "thinking", "wishes", "expected"), [
    (3, True, [9] * 8, [9, 9, 9, 3, 4, 9, 9, 9]),
    (0, True, [9] * 4, [3, 4, 9, 9]),
    (3, False, [9] * 8, [9] * 8),  # an answer
    (2, False, [1, 2, 9, 9, 9, 9, 9], [1, 2, 9, 9, 3, 4, 9]),
    (9, True, [9, 3, 4, 9, 9, 9], [9, 3, 4, 9, 9, 9]),  # it ends by itself
    (3, True, [9, 3, 4, 1, 2, 9, 9, 9, 9, 9], [9, 3, 4, 1, 2, 9, 9, 9, 3, 4]),  # and begins again
    (2, True, [9, 3, 7, 7, 7], [9, 3, 3, 4, 7]),  # half a marker is none
])  # fmt: skip
def test_a_budget_ends_the_reasoning(budget, thinking, wishes, expected):
    assert written(budget, thinking, wishes) == expected


class Exactly:
    """A grammar of one text."""

    def __init__(self, tokens):
        self.left = list(tokens)

    def allowed(self):
        return self.left[:1]

    def accept(self, token):
        assert token == self.left.pop(0)

    def fork(self):
        return Exactly(self.left)


@pytest.mark.parametrize(("thinking", "wishes", "expected"), [
    (False, [9] * 3, [5, 6, 7]),  # no reasoning
    (False, [1, 9, 9, 9, 3, 4, 9, 9, 9], [1, 2, 9, 9, 3, 4, 5, 6, 7]),
    (True, [9, 9, 3, 4, 9, 9, 9], [9, 9, 3, 4, 5, 6, 7]),
    (True, [9] * 9, [9, 9, 9, 9, 3, 4, 5, 6, 7]),  # a budget of four
    (True, [9, 10, 11, 12, 9, 9, 9], [9, 10, 11, 12, 5, 6, 7]),  # a marker of other tokens
])  # fmt: skip
def test_what_is_kept_is_the_answer_after_the_reasoning(thinking, wishes, expected):
    grammar, out = ReasoningGrammar(BYTES, BEGIN, END, thinking, 4, Exactly([5, 6, 7])), []
    for wish in wishes:
        allowed = grammar.fork().allowed()
        assert allowed == grammar.allowed()
        out.append(wish if allowed is None or wish in allowed else allowed[0])
        grammar.accept(out[-1])
    assert out == expected


def test_an_answer_may_begin_as_the_marker_does():
    grammar = ReasoningGrammar(BYTES, BEGIN, END, False, None, Exactly([1, 7]))
    for token in (1, 7):
        assert grammar.allowed() == [token]
        grammar.accept(token)


@pytest.mark.parametrize("source", [OPEN, PLAIN, CLOSED])
def test_a_structure_follows_the_reasoning(client, server, monkeypatch, source):
    monkeypatch.setattr(server.service, "reasons", True)
    monkeypatch.setattr(server.service, "template", Template(source, "t"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"thinking_token_budget": 5} if source is OPEN else {}
    options = {"model": "tiny", "messages": ASK, "max_tokens": 80, "seed": 1, "response_format": form}
    made = client.chat.completions.create(**options, extra_body=body).choices[0]
    assert json.loads(made.message.content)["a"] in (1, 2)
    assert made.finish_reason == "stop"
    if source is OPEN:
        assert made.message.reasoning
    choice = {"type": "function", "function": {"name": "now"}}
    options = {**options, "tools": TOOLS, "tool_choice": choice, "response_format": openai.NOT_GIVEN}
    called = client.chat.completions.create(**options, extra_body=body).choices[0].message
    assert [(c.function.name, json.loads(c.function.arguments)) for c in called.tool_calls] == [("now", {})]


def test_a_budget_of_a_request(client, server, monkeypatch):
    monkeypatch.setattr(server.service, "reasons", True)
    monkeypatch.setattr(server.service, "template", Template(OPEN, "open"))
    options = {"model": "tiny", "messages": ASK, "max_tokens": 40, "extra_body": {"thinking_token_budget": 5}}
    for budget in (0, 5):
        asked = {**options, "extra_body": {"thinking_token_budget": budget, "ignore_eos": True}}
        for choice in client.chat.completions.create(**asked, n=2).choices:
            assert (getattr(choice.message, "reasoning", None) is None) == (budget == 0)
            assert "</think>" not in choice.message.content
    for name, value in (("bad_words", ["</think>"]), ("bad_words", ["<"]), ("allowed_token_ids", [35, 36])):
        body = {"thinking_token_budget": 5, name: value}
        with pytest.raises(openai.BadRequestError, match="does not let </think> be written"):
            client.chat.completions.create(**{**options, "extra_body": body})
    whole = client.chat.completions.create(**options).usage
    assert whole.completion_tokens_details.reasoning_tokens == 5
    with pytest.raises(openai.BadRequestError, match="give 0 or more"):
        client.chat.completions.create(**{**options, "extra_body": {"thinking_token_budget": -1}})
    monkeypatch.setattr(server.service, "template", Template(CLOSED, "closed"))
    with pytest.raises(openai.BadRequestError, match="has not ended the reasoning"):
        client.chat.completions.create(**options, response_format={"type": "json_object"})
    monkeypatch.setattr(server.service, "reasons", False)
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser"):
        client.chat.completions.create(**options)
