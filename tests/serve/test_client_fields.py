"""Fields that today's clients send by default, and the chat's own."""

import json
import re
from urllib.request import Request, urlopen

import pytest
from tests.serve.test_reliability import call, error

import ridgeline
from ridgeline.data.examples import Template
from ridgeline.serve import service
from ridgeline.serve.bodies import WrongBody, parse, wrong_query
from ridgeline.serve.chat import ChatCompletion
from ridgeline.serve.request import EngineRequest

CHAT = [{"role": "user", "content": "Hi"}]
COMPLETION, CONVERSATION = "/v1/completions", "/v1/chat/completions"
BASE = {
    COMPLETION: {"prompt": "abc", "max_tokens": 3, "temperature": 0},
    CONVERSATION: {"messages": CHAT, "max_tokens": 3, "temperature": 0},
}
SOURCE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}{{ mark | default('') }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def template(server, monkeypatch):
    def use(source=SOURCE):
        monkeypatch.setattr(server.service, "template", Template(source, "t"))

    use()
    return use


@pytest.mark.parametrize("path", [COMPLETION, CONVERSATION])
def test_a_priority_reaches_the_engine(server, monkeypatch, path):
    seen = []
    monkeypatch.setattr(service, "EngineRequest", lambda *a, **k: seen.append(EngineRequest(*a, **k)) or seen[-1])
    assert call(server, path, {**BASE[path], "priority": 7})[0] == 200
    assert [r.priority for r in seen] == [7]


def answer(server, path, **more):
    status, _, said = call(server, path, {**BASE[path], **more})
    assert status == 200, said
    body = json.loads(said)
    return body["choices"][0], body["usage"]["prompt_tokens"]


def prompt_of(server, **more):
    """The text that a chat's template gives."""
    service = server.service
    from ridgeline.serve.chat import ChatCompletion

    body = ChatCompletion.model_validate({**BASE[CONVERSATION], **more})
    return service.vocabulary.decode(service.chat(body, b"").jobs[0].request.prompt, False)


EVERYWHERE = {
    "store": True, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y", "user": "z",
    "metadata": {"a": "b"}, "stop": "", "seed": 5.0, "n": 1.0, "top_k": -1.0, "max_tokens": 3.0, "min_tokens": 0.0,
}  # fmt: skip
CHAT_ONLY = {
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "verbosity": "low", "modalities": ["text"],
    "prediction": {"type": "content", "content": "abc"}, "reasoning_effort": "high",
}  # fmt: skip


@pytest.mark.parametrize(("path", "field"), [(p, f) for p in BASE for f in EVERYWHERE]
                         + [(CONVERSATION, f) for f in CHAT_ONLY])  # fmt: skip
def test_without_effect(server, template, path, field):
    template("{{ messages[0].content }}")
    value = {**EVERYWHERE, **CHAT_ONLY}[field]
    assert answer(server, path, **{field: value}) == answer(server, path)


@pytest.mark.parametrize("path", BASE)
def test_null_stands_for_what_is_left_out(server, template, path):
    from ridgeline.serve.chat import ChatCompletion
    from ridgeline.serve.openai import Completion

    model = Completion if path == COMPLETION else ChatCompletion
    optional = [f.alias or n for n, f in model.model_fields.items() if not f.is_required() and n not in BASE[path]]
    assert len(optional) > 30
    assert answer(server, path, **dict.fromkeys(optional)) == answer(server, path)


def test_null_does_not_stand_for_what_is_needed(server, template):
    for path, needed in ((COMPLETION, "prompt"), (CONVERSATION, "messages")):
        status, _, said = call(server, path, {**BASE[path], needed: None})
        assert (status, error(said)["param"]) == (400, needed)


@pytest.mark.parametrize(("field", "value"), [
    ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"), ("seed", 5.5),
    ("modalities", ["audio"]), ("n", True), ("continue_final_message", True),
    ("chat_template_kwargs", {"messages": []}), ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user"}]),
])  # fmt: skip
def test_what_has_no_such_effect_is_refused(server, template, field, value):
    status, _, said = call(server, CONVERSATION, {**BASE[CONVERSATION], field: value})
    assert status == 400
    assert error(said)["param"].startswith(field)


def test_the_template_gets_its_variables(server, template):
    assert prompt_of(server) == "<user>Hi<assistant>"
    assert prompt_of(server, reasoning_effort="low", chat_template_kwargs={"mark": "!"}) == "<user>Hi(low)!<assistant>"


def test_developers_are_the_system_unless_the_template_knows_them(server, template):
    talk = [{"role": "developer", "content": "Be"}, *CHAT]
    assert prompt_of(server, messages=talk).startswith("<system>Be|")
    template("{% if messages[0].role == 'developer' %}{% endif %}" + SOURCE)
    assert prompt_of(server, messages=talk).startswith("<developer>Be|")


def test_a_reply_without_text_may_be_sent_again(server, template):
    talk = [*CHAT, {"role": "assistant", "content": None}, *CHAT]
    assert prompt_of(server, messages=talk) == "<user>Hi|<assistant>|<user>Hi<assistant>"


@pytest.mark.parametrize(("source", "end"), [(SOURCE, "I am "), ("{{ messages[-1].content.strip() }}</s>", "I am")])
def test_the_last_message_is_continued(server, template, source, end):
    template(source)
    talk = [*CHAT, {"role": "assistant", "content": "I am "}]
    assert prompt_of(server, messages=talk, continue_final_message=True, add_generation_prompt=False).endswith(end)


# ---- vLLM's ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"use_beam_search": True, "n": 2}])
def test_only_allowed_tokens_come(server, more):
    allowed = [70, 71, 72]
    status, _, said = call(server, COMPLETION, {"prompt": "abc", "max_tokens": 6, "allowed_token_ids": allowed, **more,
                                                "ignore_eos": True})  # fmt: skip
    assert status == 200, said
    for choice in json.loads(said)["choices"]:
        assert set(server.service.vocabulary.encode(choice["text"], False)) <= set(allowed)
    status, _, said = call(server, COMPLETION, {"prompt": "abc", "allowed_token_ids": [10**6]})
    assert (status, error(said)["param"]) == (400, "allowed_token_ids")


def test_bad_words_never_come(server):
    letters = server.service.vocabulary.encode("abcdefgh", False)
    settings = {"max_tokens": 12, "ignore_eos": True, "temperature": 1, "seed": 4, "allowed_token_ids": letters}

    def text(**more):
        return answer(server, COMPLETION, **settings, **more)[0]["text"]

    plain = text()
    for word in (plain[2], plain[2:4], plain[1:5]):  # of one token, of two and of four
        assert word in plain
        assert word not in text(bad_words=[word])
    assert text(bad_words=["never said"]) == plain


def test_a_prompt_is_cut_to_its_end(server):
    whole, count = answer(server, COMPLETION, prompt="abcdefgh")
    assert count == 8
    cut, count = answer(server, COMPLETION, prompt="abcdefgh", truncate_prompt_tokens=3)
    assert (cut["text"], count) == (answer(server, COMPLETION, prompt="fgh")[0]["text"], 3)
    assert answer(server, COMPLETION, prompt="abcdefgh", truncate_prompt_tokens=-1)[0] == whole
    longer = "a" * (server.service.max_model_len + 5)
    assert answer(server, COMPLETION, prompt=longer, truncate_prompt_tokens=-1, max_tokens=1)[1] == (
        server.service.max_model_len - 1
    )


# ---- paths and headers -----------------------------------------------------------------------------------------------


def request(server, method, path, **headers):
    with urlopen(Request(f"{server.url}{path}", method=method, headers=headers)) as answer:
        return answer.status, dict(answer.headers), answer.read()


def test_paths(server):
    assert json.loads(request(server, "GET", "/version")[2]) == {"version": ridgeline.__version__}
    assert json.loads(request(server, "GET", "/load")[2]) == {"server_load": 0}
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health/"), ("GET", "/v1/models/")):
        assert request(server, method, path)[0] == 200
    status, headers, body = request(server, "HEAD", "/v1/models")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(request(server, "GET", "/v1/models")[2])


def test_a_request_keeps_its_id(server):
    assert request(server, "GET", "/health", **{"X-Request-Id": "mine"})[1]["x-request-id"] == "mine"
    made = {
        request(server, "GET", "/health", **{"X-Request-Id": bad})[1]["x-request-id"] for bad in ("", "a b", "x" * 200)
    }
    assert len(made) == 3
    assert all(len(name) == 32 for name in made)


def asked(server, path, **more):
    status, _, text = call(server, path, {**BASE[path], **more})
    assert status == 200, text
    return json.loads(text)


def test_a_prompt_is_cut_at_either_end(server):
    ids = list(range(5, 15))
    for side, kept in (("right", ids[:4]), ("left", ids[-4:]), (None, ids[-4:])):
        more = {} if side is None else {"truncation_side": side}
        made = asked(server, COMPLETION, prompt=ids, truncate_prompt_tokens=4, return_token_ids=True, **more)
        assert made["choices"][0]["prompt_token_ids"] == kept
    assert error(call(server, COMPLETION, {**BASE[COMPLETION], "truncation_side": "middle"})[2])["param"] == (
        "truncation_side"
    )


def test_log_probabilities_of_chosen_tokens(server):
    many = {"temperature": 0, "max_tokens": 2, "allowed_token_ids": [9], "return_tokens_as_token_ids": True}
    everything = asked(server, COMPLETION, **{**many, "allowed_token_ids": None, "logprobs": 20, "max_tokens": 1})
    known = everything["choices"][0]["logprobs"]["top_logprobs"][0]
    third = int(list(known)[2].removeprefix("token_id:"))
    made = asked(server, COMPLETION, **many, logprobs=5, logprob_token_ids=[third, 40])
    first = made["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(first) == {f"token_id:{i}" for i in (9, third, 40)}
    assert first[f"token_id:{third}"] == pytest.approx(known[f"token_id:{third}"], abs=1e-5)
    chat = asked(server, CONVERSATION, **many, logprobs=True, logprob_token_ids=[40])
    for place in chat["choices"][0]["logprobs"]["content"]:
        assert [t["token"] for t in place["top_logprobs"]] == ["token_id:9", "token_id:40"]
    refused = call(server, COMPLETION, {**BASE[COMPLETION], "logprob_token_ids": [1]})[2]
    assert error(refused)["param"] == "logprob_token_ids"


def test_an_echoed_chat_begins_with_the_last_message(server, template):
    talk = [*CHAT, {"role": "assistant", "content": "It is"}]
    more = {"messages": talk, "add_generation_prompt": False, "continue_final_message": True}
    plain, echoed = (asked(server, CONVERSATION, **more, echo=echo)["choices"][0] for echo in (False, True))
    assert echoed["message"]["content"] == "It is" + plain["message"]["content"]
    text = call(server, CONVERSATION, {**BASE[CONVERSATION], **more, "echo": True, "stream": True})[2]
    chunks = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == echoed["message"]["content"]
    assert asked(server, CONVERSATION, echo=True)["choices"][0] == asked(server, CONVERSATION)["choices"][0]


def test_invocations_are_passed_on(server):
    for path, body in BASE.items():
        made = json.loads(call(server, "/invocations", body)[2])
        assert made["choices"] == asked(server, path)["choices"]
    vectors = [
        json.loads(call(server, path, {"input": "ab"})[2])["data"] for path in ("/invocations", "/v1/embeddings")
    ]
    assert vectors[0] == vectors[1]
    for raw in (b"[1]", b"{", b'{"x": 1}'):
        assert call(server, "/invocations", raw=raw, method="POST")[0] == 400
    assert error(call(server, "/invocations", {"prompt": "a", "max_tokens": 0})[2])["param"] == "max_tokens"


def test_numbers_of_embeddings_as_bytes(server):
    import base64
    import struct

    plain = json.loads(call(server, "/v1/embeddings", {"input": ["ab", "c"]})[2])["data"]
    for dtype, code, size, close in (("float32", "f", 4, 1e-6), ("float16", "e", 2, 1e-3), ("bfloat16", "H", 2, 1e-2)):
        for end, mark in (("little", "<"), ("big", ">")):
            form = {"embed_dtype": dtype, "endianness": end}
            reply = call(server, "/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "base64", **form})[2]
            for one, other in zip(json.loads(reply)["data"], plain, strict=True):
                raw = base64.b64decode(one["embedding"])
                assert len(raw) == size * len(other["embedding"])
                found = struct.unpack(f"{mark}{len(raw) // size}{code}", raw)
                if dtype == "bfloat16":  # the upper half of a float32
                    found = struct.unpack(f"<{len(found)}f", b"".join(struct.pack("<HH", 0, n) for n in found))
                assert found == pytest.approx(other["embedding"], abs=close)


def test_a_conversation_is_embedded_as_its_text(server, template):
    talk = {"messages": [*CHAT, {"role": "assistant", "content": "So"}]}
    made = json.loads(call(server, "/v1/embeddings", talk)[2])
    text = json.loads(
        call(server, "/v1/embeddings", {"input": "<user>Hi|<assistant>So", "add_special_tokens": False})[2]
    )
    assert made["data"] == text["data"]
    both = {**talk, "add_generation_prompt": True, "continue_final_message": True}
    assert "Cannot set both" in error(call(server, "/v1/embeddings", both)[2])["message"]


def test_further_fields_of_a_message_are_the_templates(server, monkeypatch):
    monkeypatch.setattr(server.service, "template", Template("{% for m in messages %}{{ m.mood }}|{% endfor %}", "t"))
    body = {"messages": [{"role": "user", "content": "a", "mood": "glad"}, {"role": "user", "content": "b"}],
            "max_tokens": 1, "return_token_ids": True}  # fmt: skip
    status, _, text = call(server, "/v1/chat/completions", body)
    assert status == 200, text
    assert server.service.vocabulary.decode(json.loads(text)["prompt_token_ids"]) == "glad||"


@pytest.mark.parametrize(("tokens", "names"), [(1, set()), (4, {"mean_itl_ms"})])
@pytest.mark.parametrize("stream", [False, True])
def test_when_the_tokens_came(server, monkeypatch, tokens, names, stream):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    def answers(**more):
        status, _, text = call(server, "/v1/chat/completions", {**body, **more})
        assert status == 200, text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        return [json.loads(line) for line in lines]

    assert not any("metrics" in a for a in answers())
    monkeypatch.setattr(server.service, "request_metrics", True)
    *before, last = answers()
    assert not any("metrics" in a for a in before)
    expected = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second", *names}
    assert set(last["metrics"]) == expected
    assert all(v >= 0 for v in last["metrics"].values())
    assert last["metrics"]["time_to_first_token_ms"] >= last["metrics"]["queue_time_ms"]
    assert not any("metrics" in a for a in answers(n=2))  # they are one output's


def test_the_reason_comes_with_the_last_text(server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True, "stream": True}
    text = call(server, "/v1/chat/completions", body)[2]
    choices = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert choices[-1]["delta"]["content"]


BATCH = "/v1/chat/completions/batch"


def test_several_conversations_in_one_request(server, template):
    template()
    talks = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "And"}, {"role": "assistant",
             "content": "So"}]]  # fmt: skip
    more = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 1, "echo": True}
    status, _, text = call(server, BATCH, {"messages": talks, "request_id": "mine", **more})
    assert status == 200, text
    found = json.loads(text)
    assert found["id"] == "chatcmpl-mine"
    prompts = 0
    for i, talk in enumerate(talks):
        alone = json.loads(call(server, CONVERSATION, {"messages": talk, **more})[2])
        choice = found["choices"][i]
        assert choice["index"] == i
        assert choice["message"] == alone["choices"][0]["message"]
        tokens = [[entry["token"] for entry in c["logprobs"]["content"]] for c in (choice, alone["choices"][0])]
        assert tokens[0] == tokens[1]
        prompts += alone["usage"]["prompt_tokens"]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (prompts, 12)


@pytest.mark.parametrize(("more", "param"), [
    ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"),
    ({"messages": []}, "messages"), ({"messages": [[]]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
])  # fmt: skip
def test_what_several_conversations_cannot_be(server, template, more, param):
    template()
    status, _, text = call(server, BATCH, {"messages": [[{"role": "user", "content": "Hi"}]], **more})
    assert (status, error(text)["param"]) == (400, param), text


def test_types_of_errors_are_those_of_who_made_the_route(server):
    for path, body, kind in (
        ("/v1/embeddings", {}, "invalid_request_error"), ("/pooling", {}, "BadRequestError"),
        ("/v1/score", {}, "BadRequestError"), ("/tokenize", {"prompt": "a", "model": "none"}, "NotFoundError"),
        ("/v1/completions", {"prompt": "a", "model": "none"}, "not_found_error"),
    ):  # fmt: skip
        assert error(call(server, path, body)[2])["type"] == kind


def test_token_strings_are_the_vocabularys(server):
    found = json.loads(call(server, "/tokenize", {"prompt": "a b", "return_token_strs": True})[2])
    assert found["token_strs"] == [server.service.vocabulary.tokenizer.id_to_token(t) for t in found["tokens"]]


@pytest.mark.parametrize("path", BASE)
def test_null_asks_for_nothing_that_is_not_known(server, path):
    nothing = {"functions": None, "function_call": None, "web_search_options": None, "audio": None, "guided_json": None}
    assert answer(server, path, **nothing) == answer(server, path)
    status, _, said = call(server, path, {**BASE[path], "functions": []})
    assert (status, error(said)["param"]) == (400, "functions")


PARTS = [
    ["Hi", {"type": "text", "text": "there"}],
    [{"type": "input_text", "text": "Hi"}, {"type": "output_text", "text": "there"}],
    [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "there"}],
    [{"type": "refusal", "refusal": "Hi"}, {"type": "text", "text": "there", "annotations": None}],
]


@pytest.mark.parametrize("content", PARTS)
def test_contents_in_parts(server, template, content):
    template("{{ messages[0].content }}")
    messages = [{"role": "assistant", "content": content}]
    assert prompt_of(server, messages=messages) == "Hi\nthere"


def test_a_template_that_reads_parts_is_given_them(server, template):
    both = "{% if c is string %}={{ c }}{% else %}{% for content in c %}[{{ content.text }}{{ content.lang }}]"
    for source in (
        "{% for part in messages[0]['content'] %}[{{ part.text }}{{ part.lang }}]{% endfor %}",
        "{% for p in messages[0]['content'] | selectattr('type', 'equalto', 'text') | list %}[{{ p.text }}{{ p.lang }}]"
        "{% endfor %}",
        "{% for p in messages[0].content[:2] %}[{{ p.text }}{{ p.lang }}]{% endfor %}",
        "{% set c = messages[0].content %}" + both + "{% endfor %}{% endif %}{% for x in messages[0].content %}"
        "{% endfor %}",
    ):
        template(source)
        parts = [{"type": "text", "text": "Hi", "lang": "en"}, {"type": "text", "text": "there"}]
        assert prompt_of(server, messages=[{"role": "user", "content": parts}]) == "[Hien][there]"
    assert prompt_of(server, messages=[{"role": "user", "content": "Hi"}]) == "=Hi"
    template("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}!{% endfor %}")
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(server, messages=[{"role": "assistant", "content": parts}], **open_end) == "Hithere"


TALK = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
WRONG = [
    (CONVERSATION, "messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CONVERSATION, "messages[0].content[1].text",
     {"messages": [{"role": "user", "content": ["a", {"type": "text"}]}]}),
    (CONVERSATION, "messages[0].content[0]", {"messages": [{"role": "user", "content": [5]}]}),
    (CONVERSATION, "messages[0].content[0]", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", **{str(i): i for i in range(17)}}]}]}),
    (CONVERSATION, "messages[0].content[0].x", {"messages": [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "a", "x": 1}]}]}),
    (CONVERSATION, "messages[0].content", {"messages": [{"role": "user", "content": ["a"] * 1025}]}),
    (CONVERSATION, "messages[0]", {"messages": [5]}),
    (CONVERSATION, "tool_choice.function.x", {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}),
    (CONVERSATION, "kv_transfer_params.remote_port", {"kv_transfer_params": {"remote_port": "x"}}),
    (CONVERSATION, "kv_transfer_params.prompt_token_ids[1]", {"kv_transfer_params": {"prompt_token_ids": [1, "a"]}}),
    (CONVERSATION, "kv_transfer_params", {"kv_transfer_params": 5}),
    (CONVERSATION, "stop[1]", {"stop": ["a", 5]}),
    (COMPLETION, "prompt[1][0]", {"prompt": [[1], ["a"]]}),
    ("/v1/responses", "input[0].content[0].x",
     {"input": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}),
    ("/v1/responses", "input[0].content", {"input": [{"role": "user", "content": TALK[0]["content"] * 1025}]}),
    ("/v1/messages", "messages[0].content[0].citations",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": 5}]}]}),
    ("/v1/messages", "messages[0].content", {"messages": [{"role": "user", "content": TALK[0]["content"] * 1025}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "more"), WRONG)
def test_a_fault_is_told_where_the_body_has_it(server, path, param, more):
    plain = {"prompt": "a"} if path == COMPLETION else {"input": "a"} if "responses" in path else {"messages": TALK}
    status, _, said = call(server, path, {**plain, "max_tokens": 2, **more} if "input" not in plain else more)
    assert (status, error(said)["param"]) == (400, param), said
    message = error(said)["message"]
    assert message.startswith((f"{param}: ", f"unknown field '{param}'"))
    assert not re.search(r"union|list\[|instance|[A-Z]\w+(Part|Choice|Message|Block|Transfer)", message)


def test_faults_say_no_more_than_what_is_wrong():
    """Another kind of part is told by its type alone; parameters of a path and headers by their names."""
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}
    with pytest.raises(WrongBody) as e:
        parse(ChatCompletion, json.dumps(body).encode(), "application/json", 64)
    assert str(e.value).startswith("messages[0].content[0].type: Input should be 'text'")
    assert ";" not in str(e.value)
    fault = {"type": "int_parsing", "msg": "Input should be an integer"}
    for place, query in (("path", {}), ("header", {}), ("query", {"after": "x"})):
        said = wrong_query([{**fault, "loc": (place, "after")}], query)
        assert (said.param, str(said)) == ("after", "after: Input should be an integer")
