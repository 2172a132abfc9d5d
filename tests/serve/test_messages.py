"""Anthropic's Messages API: blocks, events, calls, tokens, beside the chat completion that they come from."""

import json

import pytest
from tests.serve.running import running
from tests.serve.test_reliability import call, error
from tests.serve.test_tools import CALLED, ROME, SOURCE, forced, tools  # noqa: F401 (a fixture)

ASK = [{"role": "user", "content": "Hi"}]
BASE = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": ASK}
TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
         {"name": "now", "input_schema": {"type": "object", "properties": {}}}]  # fmt: skip


def message(server, **more):
    status, _, text = call(server, "/v1/messages", {**BASE, **more})
    assert status == 200, text
    return json.loads(text)


def streamed(server, **more):
    """The events, and the message that they add up to."""
    status, _, text = call(server, "/v1/messages", {**BASE, **more, "stream": True})
    assert status == 200
    events = []
    for part in text.split("\n\n"):
        if part.startswith("event: "):
            name, data = part.split("\n", 1)
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    made, arguments = dict(events[0]["message"]), {}
    assert [e["type"] for e in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    made["content"] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(made["content"])
            made["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = made["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                block[kind] += delta[kind]
        elif event["type"] == "message_delta":
            made.update(event["delta"], usage=event["usage"])
    for index, text in arguments.items():
        made["content"][index]["input"] = json.loads(text)
    return made


def plain(made):
    """A message without what differs from one request to the next."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in made["content"]]
    return {**{k: v for k, v in made.items() if k not in ("id", "usage")}, "content": blocks}


def test_a_text_is_that_of_the_chat(server):
    whole = message(server, system="Be")
    talk = [{"role": "system", "content": "Be"}, *ASK]
    chat = json.loads(call(server, "/v1/chat/completions", {"messages": talk, "max_tokens": 12, "temperature": 0})[2])
    assert whole["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["model"]) == (
        "message", "assistant", "max_tokens", "tiny",
    )  # fmt: skip
    assert plain(streamed(server, system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}])) == (
        plain(whole)
    )
    used, theirs = whole["usage"], chat["usage"]
    read = sum(used[k] for k in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    assert (read, used["output_tokens"]) == (theirs["prompt_tokens"], theirs["completion_tokens"])
    counted = call(server, "/v1/messages/count_tokens", {"messages": ASK, "system": "Be", "model": "tiny"})[2]
    assert json.loads(counted) == {"input_tokens": theirs["prompt_tokens"]}


def test_what_the_cache_holds_is_counted(folder):
    long = [{"role": "user", "content": "abcdefgh" * 12}]
    with running(folder) as own:
        first, again = (message(own, messages=long, max_tokens=1)["usage"] for _ in range(2))
        assert first["cache_read_input_tokens"] == 0
        assert first["cache_creation_input_tokens"] == again["cache_read_input_tokens"] > 0
        assert first["input_tokens"] == again["input_tokens"]


def test_a_stop_sequence_is_named(server, monkeypatch):
    service = type(server.service)
    monkeypatch.setattr(service, "_sampling", forced(service._sampling, "one two three"))
    made = message(server, stop_sequences=["two"], max_tokens=40)
    assert (made["content"][0]["text"], made["stop_reason"], made["stop_sequence"]) == ("one ", "stop_sequence", "two")
    assert message(server, max_tokens=40)["stop_reason"] == "end_turn"


def test_calls_are_blocks_and_go_back(server, tools):  # noqa: F811
    tools("hermes", f"I see. <tool_call>{ROME}</tool_call>")
    whole = message(server, tools=TOOLS, max_tokens=200)
    text, used = whole["content"]
    assert (text["text"], used["name"], used["input"]) == ("I see.", *CALLED[0])
    assert whole["stop_reason"] == "tool_use"
    assert plain(streamed(server, tools=TOOLS, max_tokens=200)) == plain(whole)
    cut = message(server, tools=TOOLS, max_tokens=60)
    assert (cut["content"][-1]["input"], cut["stop_reason"]) == ({}, "max_tokens")


def test_a_conversation_is_rendered_as_that_of_a_chat(server, tools):  # noqa: F811
    tools("hermes", None, SOURCE)
    turns = [
        *ASK,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "So", "signature": "x"}, {"type": "text", "text": "Let me"},
            {"type": "tool_use", "id": "a", "name": "now", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "noon"},
                                     {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    talk = [
        *ASK,
        {"role": "assistant", "content": "Let me", "reasoning_content": "So",
         "tool_calls": [{"id": "a", "function": {"name": "now", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"}, {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    functions = [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in TOOLS]
    count = json.loads(call(server, "/v1/messages/count_tokens", {"messages": turns, "tools": TOOLS})[2])
    assert (
        count["input_tokens"]
        == json.loads(call(server, "/tokenize", {"messages": talk, "tools": functions})[2])["count"]
    )


@pytest.mark.parametrize(("choice", "names"), [
    ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "now"}),
    ({"type": "tool", "name": "now"}, {"now"}),
])  # fmt: skip
def test_a_call_can_be_required(server, tools, choice, names):  # noqa: F811
    tools()
    made = message(server, tools=TOOLS, tool_choice=choice, max_tokens=120, temperature=1)
    assert [b["type"] for b in made["content"]] == ["tool_use"]
    assert made["content"][0]["name"] in names


def test_an_answer_may_be_begun_and_have_a_structure(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    made = message(server, output_config=config, max_tokens=40)
    assert set(json.loads(made["content"][0]["text"])) == {"a"}
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    counts = [json.loads(call(server, "/v1/messages/count_tokens", {"messages": m})[2])["input_tokens"]
              for m in (begun, [*begun, *ASK])]  # fmt: skip
    talk = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert counts[0] == json.loads(call(server, "/tokenize", talk)[2])["count"] < counts[1]


@pytest.mark.parametrize(("more", "param"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 9999}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"mcp_servers": []}, "mcp_servers"), ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
])  # fmt: skip
def test_what_cannot_be_is_refused(server, more, param):
    body = {k: v for k, v in {**BASE, **more}.items() if v is not None}
    status, _, text = call(server, "/v1/messages", body)
    assert (status, error(text)["param"], json.loads(text)["type"]) == (400, param, "error"), text


def test_the_key_comes_as_anthropics_clients_send_it(folder):
    with running(folder, keys=["k"]) as own:
        assert call(own, "/v1/messages", BASE)[0] == 401
        assert call(own, "/v1/messages", BASE, headers={"x-api-key": "no"})[0] == 401
        assert call(own, "/v1/messages", BASE, headers={"x-api-key": "k"})[0] == 200


def test_reasoning_is_a_block(server, tools, monkeypatch):  # noqa: F811
    tools("hermes", "<think>\nSo.\n</think>\n\nYes", "{{ messages[0].content }}")
    monkeypatch.setattr(server.service, "reasons", True)
    monkeypatch.setattr(type(server.service), "_begun", lambda *a: False)  # the grammar above is the test's own
    monkeypatch.setattr(type(server.service), "_with_reasoning", lambda service, sampling, *_: sampling)
    made = message(server, max_tokens=60)
    assert [(b["type"], b[b["type"]]) for b in made["content"]] == [("thinking", "So."), ("text", "Yes")]
    assert plain(streamed(server, max_tokens=60)) == plain(made)
