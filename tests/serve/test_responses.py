"""Responses, by the official client: whole, streamed, continued."""

import asyncio
import json
import time

import openai
import pytest
from tests.serve.running import running
from tests.serve.test_reliability import Slow, call, error
from tests.serve.test_tools import CALLED, ROME, SOURCE, TOOLS, fits, forced, tools  # noqa: F401 (a fixture)

from ridgeline.data.examples import Template
from ridgeline.serve import responses
from ridgeline.serve.response_bodies import ResponseRequest
from ridgeline.serve.responses import Responses

OPTIONS = {"model": "tiny", "temperature": 0, "max_output_tokens": 12, "extra_body": {"logit_bias": {"0": -100}}}
ORDERS = {
    "message": ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                "content_part.done", "output_item.done"],
    "reasoning": ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
                  "content_part.done", "output_item.done"],
    "function_call": ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                      "output_item.done"],
    "empty": ["output_item.added", "output_item.done"],
}  # fmt: skip
"""The events of an item, by its type."""
FLAT = [{"type": "function", **t["function"]} for t in TOOLS]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def same(response):
    """A response without what differs from one request to the next."""
    plain = response.model_dump(exclude={"id", "created_at", "output", "previous_response_id", "usage"})
    drop = ("id", "call_id", "parsed", "parsed_arguments")
    items = [{k: v for k, v in item.model_dump().items() if k not in drop} for item in response.output]
    for part in (part for item in items for part in item.get("content") or []):
        part.pop("parsed", None)
    return plain, items


def both(client, **more):
    """A response, and its stream put together by the client."""
    options = {**OPTIONS, **more}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    deltas = [e for e in events if e.type.endswith(".delta")]
    for at, item in enumerate(last.output):
        text = "".join(e.delta for e in deltas if e.output_index == at)
        said = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        assert text == said
        order = dict.fromkeys(e.type.removeprefix("response.") for e in events if getattr(e, "output_index", -1) == at)
        assert list(order) == ORDERS[item.type if item.type == "function_call" or item.content else "empty"]
        assert {e.item_id for e in deltas if e.output_index == at} <= {item.id}
        done = next(e for e in events if e.type == "response.output_item.done" and e.output_index == at)
        assert done.item == item
    assert same(whole) == same(last)
    return whole, last


def test_a_text_is_that_of_the_chat(client, server):
    whole, _ = both(client, input="Hi", instructions="Be")
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}],
        temperature=0, max_tokens=12, logit_bias={"0": -100},
    )  # fmt: skip
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert whole.instructions == "Be"
    server.assert_idle()


def test_what_the_model_ends_is_complete(client, server, monkeypatch):
    monkeypatch.setattr(type(server.service), "_sampling", forced(type(server.service)._sampling, "Hello."))
    whole, last = both(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}])
    assert (whole.output_text, whole.status, last.status) == ("Hello.", "completed", "completed")


def test_log_probabilities(client):
    for more in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        whole, last = both(client, input="Hi", **more)
        tokens = whole.output[0].content[0].logprobs
        assert len(tokens) == 12
        assert [t.token for t in tokens] == [t.token for t in last.output[0].content[0].logprobs]
        assert all(len(t.top_logprobs) == more.get("top_logprobs", 0) for t in tokens)


def test_a_message_without_text_has_no_part(client):
    ends = {"extra_body": {"logit_bias": {"0": 100}}}
    whole, last = both(client, input="Hi", **ends)
    assert (whole.status, whole.output_text, last.output[0].content) == ("completed", "", [])
    said, _ = both(client, input="Hi", top_logprobs=1, **ends)  # what ended it is told, in a part without text
    assert [len(part.logprobs) for part in said.output[0].content] == [1]
    assert client.responses.create(input="And?", previous_response_id=whole.id, **OPTIONS).output_text


def test_a_structure(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    whole, _ = both(client, input="Hi", text=form, max_output_tokens=60, extra_body={})
    assert json.loads(whole.output_text)["a"] in (1, 2)
    assert whole.text.format.schema_ == schema


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_calls_are_items(client, tools):  # noqa: F811
    tools(text=f"Well <tool_call>{ROME}</tool_call>")
    whole, _ = both(client, input="Hi", tools=FLAT, max_output_tokens=100)
    message, made = whole.output
    assert (message.content[0].text, made.type, made.status) == ("Well", "function_call", "completed")
    assert (made.name, json.loads(made.arguments)) == CALLED[0]
    assert made.call_id != made.id


def test_a_named_call_and_what_comes_of_it(client, server, tools):  # noqa: F811
    tools()
    choice = {"type": "function", "name": "weather"}
    more = {"tools": FLAT, "tool_choice": choice, "max_output_tokens": 60, "extra_body": {}}
    whole, _ = both(client, input="Hi", temperature=1, **{**more, "extra_body": {"seed": 2}})
    (made,) = whole.output
    fits(made.name, json.loads(made.arguments))
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "22"}
    sent = [{"role": "user", "content": "Hi"}, made.model_dump(exclude_none=True), result]
    body = ResponseRequest.model_validate({"input": sent, "max_output_tokens": 1})
    prompt = Responses(server.service).prepare(body, b"").jobs[0].request.prompt
    arguments = json.dumps(json.loads(made.arguments))
    expected = f"<user>Hi<assistant>weather={arguments}<tool>22{made.call_id}<assistant>"
    assert server.service.vocabulary.decode(prompt) == expected
    again = client.responses.create(input=[result], previous_response_id=whole.id, **OPTIONS)
    assert again.usage.input_tokens == len(prompt)


# ---- responses that are stored ---------------------------------------------------------------------------------------


def test_a_response_is_continued(client, server, monkeypatch):
    monkeypatch.setattr(server.service, "template", Template(SOURCE, "t"))
    first = client.responses.create(input="Hi", instructions="Be", **OPTIONS)
    second = client.responses.create(input="And?", previous_response_id=first.id, **OPTIONS)
    assert second.previous_response_id == first.id
    prompt = f"<user>Hi<assistant>{first.output_text}<user>And?<assistant>"  # without the first's instructions
    assert second.usage.input_tokens == len(server.service.vocabulary.encode(prompt))
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="not found") as e:
        client.responses.create(input="And?", previous_response_id=first.id, **OPTIONS)
    assert (e.value.param, e.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(second.id)
    unkept = client.responses.create(input="Hi", store=False, **OPTIONS)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_responses_belong_to_their_key_and_the_oldest_go(folder, monkeypatch):
    monkeypatch.setattr(responses, "KEPT", 2)
    with running(folder, keys=["a", "b"]) as server:
        names = []
        for _ in range(3):
            status, _, text = call(server, "/v1/responses", {"input": "Hi", "max_output_tokens": 2}, key="a")
            assert status == 200, text
            names.append(json.loads(text)["id"])
        found = [call(server, f"/v1/responses/{name}", key=key)[0] for name in names for key in "ab"]
        assert found == [404, 404, 200, 404, 200, 404]
        assert call(server, f"/v1/responses/{names[2]}", method="DELETE", key="b")[0] == 404


def test_a_conversation_is_cut_to_its_end(client, server):
    long = client.responses.create(input="x" * 2 * server.service.max_model_len, truncation="auto", **OPTIONS)
    assert (long.truncation, long.usage.input_tokens) == ("auto", server.service.max_model_len - 12)
    assert long.usage.output_tokens == 12


@pytest.mark.parametrize(("more", "param"), [
    ({"background": True, "store": False}, "background"), ({"truncation": "always"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"input": []}, "input"), ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].image_url"),
    ({"input": "x" * 10**5}, "input"), ({"top_logprobs": 21}, "top_logprobs"), ({"tools": FLAT}, "tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"), ({"include": ["file_search"]}, "include[0]"),
])  # fmt: skip
def test_what_cannot_be_is_refused(server, more, param):
    status, _, text = call(server, "/v1/responses", {"input": "Hi", "max_output_tokens": 5, **more})
    assert (status, error(text)["param"]) == (400, param), text


def test_without_effect(client):
    plain = client.responses.create(input="Hi", **OPTIONS)
    more = {
        "service_tier": "auto", "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "p",
        "truncation": "disabled", "background": False, "max_tool_calls": 3, "parallel_tool_calls": True, "tools": [],
        "tool_choice": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    assert client.responses.create(input="Hi", **more, **OPTIONS).output_text == plain.output_text


def test_the_store_is_bounded_by_what_it_holds(client, monkeypatch):
    def kept(response):
        try:
            return client.responses.retrieve(response.id).id == response.id
        except openai.NotFoundError:
            return False

    monkeypatch.setattr(responses, "KEPT_TEXT", 6000)
    first, second = (client.responses.create(input="x", **OPTIONS) for _ in range(2))
    assert kept(first)
    assert kept(second)
    large = client.responses.create(input="x", top_logprobs=2, **OPTIONS)
    assert kept(large)
    assert not kept(first)


# ---- responses that are made in the background -----------------------------------------------------------------------


def ended(client, name):
    """A background response once it has ended."""
    until = time.monotonic() + 60
    while (response := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return response


def test_a_response_in_the_background(client, server):
    client.responses.create(input="Hi", **OPTIONS)  # whose prompt is cached for the others
    plain = client.responses.create(input="Hi", **OPTIONS)
    with Slow(server.engine, 0.02):
        begun = client.responses.create(input="Hi", background=True, **OPTIONS)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError, match="still being made"):
            client.responses.create(input="And?", previous_response_id=begun.id, **OPTIONS)
    made = ended(client, begun.id)
    assert (made.output_text, made.status, made.background) == (plain.output_text, "incomplete", True)
    assert made.usage == plain.usage
    assert client.responses.cancel(made.id) == made  # too late: it stays as it is
    client.responses.create(input="And?", previous_response_id=made.id, **OPTIONS)
    with pytest.raises(openai.BadRequestError, match="only be used when `store` is true"):
        client.responses.create(input="Hi", background=True, store=False, **OPTIONS)
    server.assert_idle()


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_background_response_is_ended(client, server, end):
    with Slow(server.engine, 0.02):
        begun = client.responses.create(input="Hi", background=True, **{**OPTIONS, "max_output_tokens": 200})
        server.wait(lambda: client.responses.retrieve(begun.id).output)
        if end == "cancel":
            found = client.responses.cancel(begun.id)
            assert (found.status, found.output[0].status) == ("cancelled", "incomplete")
            assert client.responses.cancel(begun.id) == found == client.responses.retrieve(begun.id)
        else:
            client.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(begun.id)
        server.wait(lambda: not server.engine.groups)
    server.assert_idle()


def test_the_events_of_a_background_response_are_read_again(client, server):
    with Slow(server.engine, 0.02):
        stream = client.responses.create(input="Hi", background=True, stream=True, **OPTIONS)
        first = [next(stream) for _ in range(5)]
        stream.close()  # it goes on without its client
        name = first[0].response.id
        rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    again = list(client.responses.retrieve(name, stream=True))
    assert again == [*first, *rest]
    assert [e.sequence_number for e in again] == list(range(len(again)))
    assert again[-1].response == ended(client, name)
    quiet = client.responses.create(input="Hi", **OPTIONS)
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(quiet.id, stream=True)


def test_no_event_is_lost_to_a_slow_reader(server):
    known = Responses(server.service)
    body = ResponseRequest.model_validate({"input": "Hi", "max_output_tokens": 3, "background": True, "stream": True})
    prepared = known.prepare(body, b"")
    running = responses._Running(responses.Writer(prepared), None)
    known._running[prepared.owner, prepared.id] = running

    async def read():
        got = []
        async for event in known.follow(prepared.id, b"", -7):
            got.append(event["n"])
            if len(got) < 5:  # while a reader holds an event more come, and the response ends
                running.events += [{"n": 2 * len(got)}, {"n": 2 * len(got) + 1}]
                running.tell()
            elif len(got) == 5:
                known._running.clear()
                running.tell()
        return got

    running.events += [{"n": 0}, {"n": 1}]
    assert asyncio.run(asyncio.wait_for(read(), 20)) == list(range(10))


def test_what_nobody_expected_fails_a_background_response(client, server, monkeypatch):
    monkeypatch.setattr(responses.Writer, "read", lambda *_: 1 / 0)
    begun = client.responses.create(input="Hi", background=True, **OPTIONS)
    made = ended(client, begun.id)
    assert (made.status, made.error.code) == ("failed", "server_error")
    server.wait(lambda: not server.engine.groups)


def test_a_failed_background_response_says_so(folder):
    with running(folder) as server:
        server.engine.step = lambda: 1 / 0
        status, _, text = call(server, "/v1/responses", {"input": "Hi", "background": True})
        name = json.loads(text)["id"]
        server.wait(lambda: server.service.loop.failure)
        found = json.loads(call(server, f"/v1/responses/{name}", method="GET")[2])
        assert (status, found["status"], found["error"]["code"]) == (200, "failed", "server_error")


def test_prompt_and_output_as_the_model_has_them(client, server):
    response = client.responses.create(
        input="Hi", **{**OPTIONS, "extra_body": {**OPTIONS["extra_body"], "enable_response_messages": True}}
    )
    (given,), (made,) = response.input_messages, response.output_messages
    assert (given["type"], len(given["tokens"])) == ("raw_message_tokens", response.usage.input_tokens)
    assert (server.service.vocabulary.decode(made["tokens"]), len(made["tokens"])) == (response.output_text, 12)
    assert made["message"] == server.service.vocabulary.decode(made["tokens"], skip_special=False)
    assert server.service.vocabulary.encode(given["message"]) == given["tokens"]


def test_what_a_response_was_made_from_is_listed(client, server):
    first = client.responses.create(**OPTIONS, input="Hi")
    given = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"role": "user", "content": "So"},
    ]
    made = client.responses.create(**OPTIONS, input=given, previous_response_id=first.id)
    found = list(client.responses.input_items.list(made.id, order="asc"))
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output", "message"]
    assert [item.type for item in found] == kinds
    assert found[0].content[0].text == "Hi"
    assert found[1].content[0].text == first.output_text
    assert (found[4].call_id, found[4].output, found[5].content[0].text) == ("c", "5", "So")
    assert len({item.id for item in found}) == len(found)
    paged = client.responses.input_items.list(made.id, limit=2)
    assert [item.id for item in paged.data] == [found[-1].id, found[-2].id]
    assert [item.id for item in paged] == [item.id for item in reversed(found)]  # page by page
    for options in ({"limit": 0}, {"after": "x"}, {"limit": "abc"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as e:
            client.responses.input_items.list(made.id, **options)
        assert e.value.param == next(iter(options))
        assert e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="starting_after: Input should be a valid integer"):
        client.responses.retrieve(made.id, extra_query={"starting_after": "abc"})
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_0")
    server.assert_idle()
