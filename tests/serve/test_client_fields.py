"""Fields that today's clients send by default, and the chat's own."""

import json
from urllib.request import Request, urlopen

import pytest
from tests.serve.test_reliability import call, error

import ridgeline
from ridgeline.data.examples import Template
from ridgeline.serve import service
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
    template("{# developer #}" + SOURCE)
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
