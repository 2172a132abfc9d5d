"""Calls of functions, by the official client: found in what the model writes, or kept by a grammar."""

import json

import openai
import pytest
from tests.serve.test_reliability import call, error

from ridgeline.data.examples import Template
from ridgeline.serve import written_calls
from ridgeline.serve.call_formats import FORMATS
from ridgeline.serve.harmony import Channels
from ridgeline.serve.tool_calls import LIST, Calls, Format, gather, id_maker
from ridgeline.serve.written_calls import PythonCalls
from ridgeline.spec.errors import UserError

SOURCE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather", "description": "Of a city",
    "parameters": {
        "type": "object", "required": ["city", "days"], "additionalProperties": False,
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "$defs": {"City": {"enum": ["Bonn", "Rome"]}},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
ROME = '{"name": "weather", "arguments": {"city": "Rome \\"{}\\"", "days": 2}}'
NOW = '{"name": "now", "parameters": {}}'
SCHEMAS = {"weather": WEATHER["parameters"], "now": None}
CALLED = [("weather", {"city": 'Rome "{}"', "days": 2}), ("now", {})]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture
def tools(server, monkeypatch):
    """Makes the model write calls in a format, and this very text if one is given, by a grammar."""

    def use(parser="hermes", text=None, source=SOURCE, auto=True):
        service = server.service
        monkeypatch.setattr(service, "template", Template(source, "t"))
        monkeypatch.setattr(service, "calls", FORMATS[parser])
        monkeypatch.setattr(service, "auto_calls", auto)
        if text is not None:
            monkeypatch.setattr(type(service), "_sampling", forced(type(service)._sampling, text))

    return use


def forced(plain, text):
    def sampling(service, *args, **more):
        from dataclasses import replace

        return replace(plain(service, *args, **more), grammar=service.grammars.compile("choice", [text], "x"))

    return sampling


def both(client, **more):
    """(message, finish reason) of a chat, and of its stream put together."""
    options = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 200, "temperature": 0, **more}
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion().choices[0]
    return whole, streamed


def said(choice):
    calls = choice.message.tool_calls or []
    return (
        choice.message.content or "",
        [(c.function.name, json.loads(c.function.arguments)) for c in calls],
        choice.finish_reason,
    )


# ---- calls of the model's own ----------------------------------------------------------------------------------------

ARGS = '{"city": "Rome \\"{}\\"", "days": 2}'
BOTH = (("weather", ARGS), ("now", "{}"))
SEP = "<｜tool▁sep｜>"
DEEP = ("{}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")  # fmt: skip
TAGS = (
    'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome "{}"\n</parameter>\n<parameter=days>\n2\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
HARMONY = (
    "<|channel|>analysis<|message|>I <b> look.<|end|><|start|>assistant<|channel|>final<|message|>Here.<|end|><|start|>"
    f"assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}<|call|><|start|>assistant"
    " to=functions.now<|channel|>commentary json<|message|>{}"
)
KIMI = (
    f"So.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGS}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
WRITTEN = [
    ("hermes", f"<tool_call>\n{ROME}\n</tool_call>", "", 1),
    ("hermes", f"I see. \n<tool_call>{ROME}</tool_call>\n<tool_call>\n{NOW}</tool_call>\n", "I see.", 2),
    ("llama3_json", ROME, "", 1),
    ("llama3_json", f"<|python_tag|>{ROME}; {NOW}", "", 2),
    ("mistral", f"[TOOL_CALLS] [{ROME}, {NOW}]", "", 2),
    ("granite", f"<|tool_call|>[{ROME}, {NOW}]", "", 2),
    ("phi4_mini_json", f"functools[{ROME}, {NOW}]", "", 2),
    (
        "deepseek_v3",
        DEEP.format("So.", *(f"function{SEP}{name}\n```json\n{given}\n```" for name, given in BOTH)),
        "So.",
        2,
    ),
    ("deepseek_v31", DEEP.format("", *(f"{name}{SEP}{given}" for name, given in BOTH)), "", 2),
    ("pythonic", """[weather(city='Rome "{}"', days=2), now()]""", "", 2),
    ("llama4_pythonic", """<|python_start|>[weather(city="Rome \\"{}\\"", days=2)]<|python_end|>""", "", 1),
    ("olmo3", """Yes <function_calls>\nweather(city='Rome "{}"', days=2)\nnow()\n</function_calls>""", "Yes", 2),
    ("qwen3_coder", TAGS, "I look.", 2),
    ("openai", HARMONY, "Here.", 2),
    ("internlm", f"I see.<|action_start|><|plugin|>\n{ROME}<|action_end|>\n", "I see.", 1),
    ("kimi_k2", KIMI, "So.", 2),
    (
        "functiongemma",
        'Ok <start_function_call>call:weather{city:<escape>Rome "{}"<escape>,days:2}<end_function_call>'
        "<start_function_call>call:now{}<end_function_call>",
        "Ok",
        2,
    ),
    ("mistral", 'Well[TOOL_CALLS]weather[ARGS]{"city": "Rome \\"{}\\"", "days": 2}[TOOL_CALLS]now{}', "Well", 2),
]
PLAIN = [
    ("hermes", "No <tool> here <tool_cal"),
    ("hermes", "<tool_call>{'name'}</tool_call>"),
    ("hermes", '<tool_call>{"nom": "weather"}</tool_call> yes'),
    ("llama3_json", '{"name": "Rome", "sights": 3}'),
    ("llama3_json", "[1, 2]"),
    ("mistral", "none [TOOL_CALLS]"),
    ("granite", "no <|tool_call"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing"),
    ("pythonic", "[1, 2] and more"),
    ("pythonic", "[]"),
    ("pythonic", "[now(x={1, 2}), now(y=b'a')]"),
    ("pythonic", "[now(x=1e999)]"),
    ("pythonic", '[now(x="\\ud800")]'),
    ("pythonic", "[weather('Rome')]"),
    ("pythonic", "weather(city='Rome')"),
    ("olmo3", "<function_calls>1 + 1</function_calls>"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|>none<|tool_calls_section_end|>"),
    ("functiongemma", "<start_function_call>weather<end_function_call>"),
    ("functiongemma", "<start_function_call>call:now{x:y}<end_function_call>"),
    ("openai", "no channel at all"),
    ("openai", "Use <|foo|> like this."),
    ("openai", "assistants can be trained"),
]


@pytest.mark.parametrize(
    ("parser", "text", "before", "count"), [one for one in WRITTEN if len(one[1].encode()) < 200 and one[0] != "openai"]
)
def test_calls_are_found(client, server, tools, parser, text, before, count):
    tools(parser, text)
    whole, streamed = both(client)
    assert said(whole) == said(streamed) == (before, CALLED[:count], "tool_calls")
    assert len({c.id for c in whole.message.tool_calls}) == count
    assert whole.message.content == (before or None)
    server.assert_idle()


@pytest.mark.parametrize(("parser", "text"), PLAIN)
def test_what_is_no_call_is_text(client, tools, parser, text):
    tools(parser, text)
    whole, streamed = both(client)
    for choice in (whole, streamed):
        assert (choice.message.content.strip(), choice.message.tool_calls or [], choice.finish_reason) == (
            text,
            [],
            "stop",
        )


@pytest.mark.parametrize(("parser", "text", "before", "count"), WRITTEN)
def test_how_the_text_is_cut_makes_no_difference(parser, text, before, count):
    for step in (1, 2, 3, 7, 1000):
        reader, pieces = FORMATS[parser].reader(id_maker(0), True, SCHEMAS), []
        for at in range(0, len(text), step):
            pieces += reader.push(text[at : at + step])
        pieces += reader.push("", last=True)
        assert "".join(p.text for p in pieces) == before
        found = [
            (
                next(p.name for p in pieces if p.call == i and p.name),
                json.loads("".join(p.arguments for p in pieces if p.call == i)),
            )
            for i in range(count)
        ]
        assert found == CALLED[:count]
        if step == 1 and isinstance(FORMATS[parser], (Format, Channels)):
            arguments = [p for p in pieces if p.call == 0 and p.arguments]
            assert len(arguments) > 20  # as they come


def test_arguments_as_text_and_calls_that_break():
    text = json.dumps({"name": "f", "arguments": '{"a": 1}'})
    assert gather(Calls(FORMATS["llama3_json"], id_maker(0)), text).calls[0]["function"]["arguments"] == '{"a": 1}'
    broken = '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'
    found = gather(Calls(FORMATS["hermes"], id_maker(0)), broken)
    assert (found.content, found.calls[0]["function"]) == ("", {"name": "f", "arguments": '{"a": tru}'})
    cut = gather(Calls(FORMATS["hermes"], id_maker(0)), broken[:-20])
    assert cut.calls[0]["function"] == {"name": "f", "arguments": '{"a'}  # as far as it came
    two = gather(Calls(LIST, id_maker(9)), f"[{ROME},{NOW}]").calls
    assert all(c["id"].isalnum() and len(c["id"]) == 9 for c in two)


@pytest.mark.parametrize("parser", [*FORMATS, "list"])
@pytest.mark.parametrize("parallel", [True, False])
def test_wherever_an_answer_is_cut_off_its_stream_says_the_same(parser, parallel):
    form = FORMATS.get(parser, LIST)
    broken = [
        '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> so',
        '<tool_call>{"arguments": {}, "name": "f"}',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        "[f(a=[1)]", "<function_calls>f(a='\\')", "<tool_call><function=f><parameter=a>1</function>",
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "<|start|>",
    ]  # fmt: skip
    own = [text for name, text, *_ in [*WRITTEN, *PLAIN] if parser in (name, "hermes")]
    for text in [*own, *broken]:
        for end in range(1, len(text) + 1):
            whole = gather(form.reader(str, parallel, SCHEMAS), text[:end])
            reader, content, reasoning, calls = form.reader(str, parallel, SCHEMAS), "", "", []
            for at in range(end):
                for piece in reader.push(text[at], last=at == end - 1):
                    content, reasoning = content + piece.text, reasoning + piece.reasoning
                    if piece.name:
                        calls.append({"name": piece.name, "arguments": ""})
                    elif piece.call is not None:
                        calls[piece.call]["arguments"] += piece.arguments
            found = content, reasoning, calls
            assert found == (whole.content, whole.reasoning, [c["function"] for c in whole.calls]), text[:end]
            if isinstance(reader, Calls) and not calls:  # which an answer that is not streamed has as it is
                assert content == text[:end]


CHANNELS = [("<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", 0),
            ('<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now'
             '<|message|>{}', "", 1)]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), CHANNELS)
def test_channels_are_told_apart(client, server, tools, monkeypatch, text, content, calls):
    tools("openai", text)
    # the grammar that makes the model write this text is none that a client asked for
    monkeypatch.setattr(type(server.service), "_in_channels", lambda service, structure: True)
    whole, streamed = both(client, **({} if calls else {"tools": openai.NOT_GIVEN}))
    for choice in (whole, streamed):
        assert (choice.message.content or "") == content
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
            ("now", "{}")
        ] * calls
        assert choice.message.reasoning_content == "I look."


def test_schemas_of_any_kind_are_borne():
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x</parameter></function></tool_call>"
    for schema in ({"properties": ["x"]}, {"properties": {"a": {"enum": 5}, "b": {"anyOf": None}}}, [], None):
        (made,) = gather(FORMATS["qwen3_coder"].reader(str, True, {"f": schema}), text).calls
        assert json.loads(made["function"]["arguments"]) == {"a": "1", "b": "x"}
    (made,) = gather(
        FORMATS["qwen3_coder"].reader(str, True, {"f": {"properties": {"a": {"type": "integer"}}}}), text
    ).calls
    assert json.loads(made["function"]["arguments"]) == {"a": 1, "b": "x"}


def test_a_call_of_kimi_keeps_the_id_that_its_template_reads():
    assert [c["id"] for c in gather(FORMATS["kimi_k2"].reader(str, True, {}), KIMI).calls] == [
        "functions.weather:0",
        "functions.now:1",
    ]


def test_escaped_values_are_nested_and_typed():
    text = (
        "<start_function_call>call:f{a:[<escape>x, ]<escape>,2],b:{c:true,d:<escape>3<escape>},e:<escape>4<escape>}"
        "<end_function_call>"
    )
    schema = {"properties": {"e": {"type": "integer"}, "b": {"properties": {"d": {"type": "string"}}}}}
    (made,) = gather(FORMATS["functiongemma"].reader(str, True, {"f": schema}), text).calls
    assert json.loads(made["function"]["arguments"]) == {"a": ["x, ]", 2], "b": {"c": True, "d": "3"}, "e": 4}


@pytest.mark.parametrize(("parser", "text"), [
    ("pythonic", "[now(x='{}')]"),
    ("qwen3_coder", "<tool_call><function=now><parameter=x>{}</parameter></function></tool_call>"),
])  # fmt: skip
def test_a_long_argument_is_not_read_again_for_every_token(parser, text, monkeypatch):
    reader, reads = FORMATS[parser].reader(str, True, {}), []
    plain = reader._read
    reader._read = lambda held: reads.append(held) or plain(held)
    whole = text.format("a (b" * 5000)
    pieces = [piece for at in range(0, len(whole), 4) for piece in reader.push(whole[at : at + 4])]
    assert json.loads("".join(p.arguments for p in pieces)) == {"x": "a (b" * 5000}
    assert len(reads) < 20


def test_closing_brackets_in_a_string_are_looked_at_once():
    looked = []

    class Counted(str):
        def __getitem__(self, at):
            looked.append(at)
            return super().__getitem__(at)

    calls, whole = PythonCalls(), f"f(x='{')' * 2000}')"
    made = [calls.read(Counted(whole[:size])) for size in range(1, len(whole) + 1)]
    assert made == [None] * (len(whole) - 1) + [(len(whole), "f", {"x": ")" * 2000})]
    assert len(looked) < 3 * len(whole)


def test_text_in_brackets_streams_on():
    reader, pieces = FORMATS["pythonic"].reader(str, True, {}), []
    for text in ("[", "note", "] The answer", " is long."):
        pieces += reader.push(text)
    assert "".join(piece.text for piece in pieces) == "[note] The answer is long."


def test_one_call_at_most(client, tools):
    tools("mistral", f"[TOOL_CALLS] [{ROME}, {NOW}]")
    whole, streamed = both(client, parallel_tool_calls=False)
    assert said(whole) == said(streamed) == ("", CALLED[:1], "tool_calls")


def test_log_probabilities_of_all_tokens_come(client, server, tools):
    text = WRITTEN[1][1]
    tools("hermes", text)
    options = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 200, "logprobs": True}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(stream=True, **options)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.token for e in streamed] == [e.token for e in whole]
    assert "".join(e.token for e in whole).startswith(text)


def test_the_model_calls_only_where_it_may(client, tools):
    tools(text=f"<tool_call>{ROME}</tool_call>")
    whole, streamed = both(client, tool_choice="none")
    assert said(whole) == said(streamed) == (f"<tool_call>{ROME}</tool_call>", [], "stop")
    tools(auto=False)
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        both(client)
    tools(source="{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="not shown"):
        both(client)


# ---- calls that are asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit_their_schemas(client, tools, parallel):
    tools()
    bias = {str(ord("]") + 1): -8} if parallel else {}
    whole, streamed = both(client, tool_choice="required", parallel_tool_calls=parallel, temperature=1, seed=5,
                           logit_bias=bias)  # fmt: skip
    assert said(whole) == said(streamed)
    _, calls, finish = said(whole)
    assert (whole.message.content, finish) == ("", "tool_calls")
    assert 1 <= len(calls) <= (50 if parallel else 1)
    for name, arguments in calls:
        fits(name, arguments)


def fits(name, arguments):
    if name == "now":
        assert arguments == {}
    else:
        assert name == "weather"
        assert arguments["city"] in ("Bonn", "Rome")
        assert 1 <= arguments["days"] <= 9


def test_a_named_call_fits_its_schema(client, tools):
    tools()
    choice = {"type": "function", "function": {"name": "weather"}}
    whole, streamed = both(client, tool_choice=choice, n=1, temperature=1, seed=2)
    assert said(whole) == said(streamed)
    assert (whole.message.content, said(whole)[2]) == ("", "stop")
    ((name, arguments),) = said(whole)[1]
    fits(name, arguments)


def test_outputs_are_read_apart(client, tools):
    tools("mistral")
    made = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", n=3, seed=1, max_tokens=200
    )
    for choice in made.choices:
        for name, arguments in said(choice)[1]:
            fits(name, arguments)


@pytest.mark.parametrize(("more", "param"), [
    ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS[:1] * 2}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
      "tool_choice": "required"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
])  # fmt: skip
def test_what_cannot_be_is_refused(server, tools, more, param):
    tools()
    status, _, text = call(server, "/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "max_tokens": 5, **more})
    assert (status, error(text)["param"]) == (400, param), text


def test_calls_and_their_results_go_back(server, client, tools):
    tools(text=f"<tool_call>{ROME}</tool_call>")
    reply = both(client)[0].message
    answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "22"}
    talk = [*ASK, reply.model_dump(exclude_none=True), answer]
    from ridgeline.serve.chat import ChatCompletion

    body = ChatCompletion.model_validate({"messages": talk, "tools": TOOLS, "max_tokens": 1})
    text = server.service.vocabulary.decode(server.service.chat(body, b"").jobs[0].request.prompt)
    rome = '{"city": "Rome \\"{}\\"", "days": 2}'
    assert text == f"[weather now ]<user>Hi<assistant>weather={rome}<tool>22{answer['tool_call_id']}<assistant>"
    assert client.chat.completions.create(model="tiny", messages=talk, tools=TOOLS, max_tokens=5).choices


def test_a_conversation_is_tokenized_with_its_tools(server, tools):
    tools()
    deep = {"type": "object", "properties": {"a": {"default": None}}}
    more = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    status, _, text = call(server, "/tokenize", {"messages": ASK, "tools": TOOLS + more})
    assert status == 200, text
    found = json.loads(text)
    assert server.service.vocabulary.decode(found["tokens"]) == "[weather now f ]<user>Hi<assistant>"
    tools(source="{{ tools | tojson }}")
    status, _, text = call(server, "/tokenize", {"messages": ASK, "tools": more})
    assert json.loads(server.service.vocabulary.decode(json.loads(text)["tokens"])) == more


def test_options(folder, server):
    from ridgeline.serve.checkpoint_settings import Options
    from ridgeline.serve.server import make_service

    with pytest.raises(UserError, match="hermes"):
        make_service(server.engine, folder, options=Options(tool_parser="herms"))
    with pytest.raises(UserError, match="--enable-auto-tool-choice"):
        make_service(server.engine, folder, options=Options(auto_tools=True))


def test_a_call_in_many_parts_is_read_once(monkeypatch):
    """FunctionGemma's: what was there before is not looked at again."""
    read, member = [0], written_calls._member

    def counted(*given):
        read[0] += 1
        return member(*given)

    monkeypatch.setattr(written_calls, "_member", counted)
    value = "[" + ",".join(["{b:<escape>}<escape>}"] * 300) + "]"
    reader = FORMATS["functiongemma"].reader(lambda: "id", True, {})
    whole = f"<start_function_call>call:f{{a:{value}}}<end_function_call>"
    found = [p for at in range(0, len(whole), 7) for p in reader.push(whole[at : at + 7])]
    found += reader.push("", True)
    assert json.loads("".join(p.arguments or "" for p in found)) == {"a": [{"b": "}"}] * 300}
    assert read[0] == 1 + 300 * 2
