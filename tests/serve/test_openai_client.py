"""The official client against our server."""

import asyncio
import json
import urllib.request

import openai
import pytest
from tests.serve.running import TEMPLATE

from ridgeline.serve.chat import Message


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


PROMPT = "The cat"
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 12, "logit_bias": {"0": -100, "1": -100}}


def test_a_completion_and_its_stream_say_the_same(client, server):
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert whole.object == chunks[0].object == "text_completion"
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == whole.choices[0].finish_reason
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert whole.usage.prompt_tokens == len(server.service.vocabulary.encode(PROMPT))
    assert whole.usage.completion_tokens == 12
    server.assert_idle()


def test_a_chat_and_its_stream(client):
    messages = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(messages=messages, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(c.usage is None for c in pieces)


def test_many_clients_at_once_get_what_each_gets_alone(client, server):
    prompts = [f"{i} bottles of {'beer ' * (i % 4)}" for i in range(12)]
    alone = [client.completions.create(prompt=p, **GREEDY).choices[0].text for p in prompts]

    async def together():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:

            async def one(prompt):
                stream = await c.completions.create(prompt=prompt, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(together()) == alone


def test_several_prompts_of_several_outputs_are_numbered(client):
    options = {"model": "tiny", "max_tokens": 5, "n": 3, "seed": 7, "temperature": 1.0}
    both = client.completions.create(prompt=["one", "two"], **options)
    assert [c.index for c in both.choices] == list(range(6))
    second = client.completions.create(prompt="two", **options)
    assert [c.text for c in both.choices[3:]] == [c.text for c in second.choices]
    streamed = [""] * 6
    for chunk in client.completions.create(prompt=["one", "two"], stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [c.text for c in both.choices]
    assert both.usage.completion_tokens <= 30


def test_tokens_as_prompts(client, server):
    ids = server.service.vocabulary.encode(PROMPT)
    by_text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == by_text
    assert client.completions.create(prompt=[ids, ids], **GREEDY).choices[1].text == by_text


def test_log_probabilities_of_completions(client):
    got = client.completions.create(prompt=PROMPT, logprobs=3, echo=True, **GREEDY).choices[0]
    table = got.logprobs
    assert "".join(t for t in table.tokens if not t.startswith("bytes:"))[: len(PROMPT)] == PROMPT
    assert table.token_logprobs[0] is None
    assert all(p <= 0 for p in table.token_logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in table.top_logprobs[1:])
    assert got.text.startswith(PROMPT)
    assert table.text_offset == sorted(table.text_offset)
    only = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, **{**GREEDY, "max_tokens": 0})
    assert only.choices[0].text == PROMPT
    assert only.choices[0].logprobs.token_logprobs == table.token_logprobs[: len(only.choices[0].logprobs.tokens)]
    assert only.usage.completion_tokens == 0
    two = client.completions.create(prompt=PROMPT, logprobs=3, echo=True, n=2, **GREEDY).choices
    assert two[0].logprobs.tokens == two[1].logprobs.tokens == table.tokens
    pieces = client.completions.create(prompt=PROMPT, logprobs=3, echo=True, n=2, stream=True, **GREEDY)
    streamed = [[], []]
    for chunk in pieces:
        streamed[chunk.choices[0].index] += chunk.choices[0].logprobs.token_logprobs
    for found in streamed:
        assert found[0] is None
        assert found[1:] == pytest.approx(table.token_logprobs[1:], abs=1e-4)


def test_log_probabilities_of_chats_whole_and_streamed(client):
    options = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**options)
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace") == whole.choices[0].message.content
    assert all(len(t.top_logprobs) == 2 and t.logprob <= t.top_logprobs[0].logprob for t in content)
    streamed = [
        t
        for chunk in client.chat.completions.create(stream=True, **options)
        if chunk.choices[0].logprobs
        for t in chunk.choices[0].logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in content]


def test_a_stop_string_ends_the_text_before_it(client):
    free = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = free[3:6]
    assert len(stop) == 3
    for stream in (False, True):
        made = client.completions.create(prompt=PROMPT, stop=["never", stop], stream=stream, **GREEDY)
        choices = [c.choices[0] for c in made] if stream else made.choices
        assert "".join(c.text for c in choices) == free[: free.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == stop


def test_a_seed_makes_the_output_a_function_of_the_request(client):
    def once(seed):
        return client.completions.create(prompt=PROMPT, model="tiny", max_tokens=20, seed=seed).choices[0].text

    assert once(1) == once(1) != once(2)


def test_a_repeated_prompt_is_found_in_the_cache(client):
    prompt = "a prompt that is longer than two blocks of the cache"
    client.completions.create(prompt=prompt, **GREEDY)
    again = client.completions.create(prompt=prompt, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    salted = client.completions.create(prompt=prompt, extra_body={"cache_salt": "mine"}, **GREEDY)
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == again.choices[0].text


def test_best_of_and_beams(client):
    best = client.completions.create(prompt=PROMPT, model="tiny", max_tokens=6, n=2, best_of=4, seed=1)
    assert len(best.choices) == 2
    beams = client.completions.create(prompt=PROMPT, n=2, extra_body={"use_beam_search": True, "best_of": 4}, **GREEDY)
    assert [c.index for c in beams.choices] == [0, 1]
    assert beams.choices[0].text != beams.choices[1].text


def test_json_of_a_schema(client):
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "age"],
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    options = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny", "max_tokens": 120}
    made = client.chat.completions.create(response_format=form, n=3, temperature=1.0, seed=3, **options)
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content)
        assert person["name"] in ("Ada", "Bob")
        assert 0 <= person["age"] <= 99


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        ({"json": '{"const": 7}'}, "7"),
        ({"json_object": True}, r"(?s)\{.*"),
        ({"regex": "[0-9]{3}-[a-f]+x"}, r"[0-9]{3}-[a-f]+x"),
        ({"choice": ["yes", "no"]}, "yes|no"),
    ],
)
def test_other_structures(client, structure, fits):
    import re

    options = {"prompt": "?", "model": "tiny", "max_tokens": 100, "seed": 2, "temperature": 0.8}
    text = client.completions.create(extra_body={"structured_outputs": structure}, **options).choices[0].text
    assert re.fullmatch(fits, text)


def test_embeddings(client, server):
    plain = client.embeddings.create(model="tiny", input=["one text", "another"], encoding_format="float")
    coded = client.embeddings.create(model="tiny", input=["one text", "another"])  # the client asks for base64
    assert [d.index for d in plain.data] == [0, 1]
    assert sum(x * x for x in plain.data[0].embedding) == pytest.approx(1.0)
    assert coded.data[1].embedding == pytest.approx(plain.data[1].embedding, abs=1e-6)
    assert plain.data[0].embedding != plain.data[1].embedding
    server.assert_idle()


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_clients_may_do_without_the_tokenizers_files(server):
    with urllib.request.urlopen(server.url + "/tokenizer_info") as reply:
        said = json.load(reply)
    assert said == {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": None, "tokenizer_class": None,
                    "chat_template": TEMPLATE}  # fmt: skip
    assert server.service.vocabulary.encode(said["eos_token"], special=False) == [0]


def test_mistakes_come_as_the_clients_own_errors(client):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(prompt=PROMPT, model="tiny", extra_body={"temprature": 1})
    assert e.value.param == "temprature"
    assert "did you mean temperature" in e.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=PROMPT, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(prompt="x" * 300, model="tiny")


def test_a_reply_can_be_sent_back(client, server):
    """Conversations of several turns, as the client's documentation has them."""
    messages = [{"role": "user", "content": "Hi"}]
    first = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message
    messages += [first, {"role": "user", "content": "Why?"}]
    second = client.chat.completions.create(messages=messages, **GREEDY)
    said = f"<user>Hi\n<assistant>{first.content}\n<user>Why?\n<assistant>"
    assert second.usage.prompt_tokens == len(server.service.vocabulary.encode(said, special=False))


@pytest.mark.parametrize(
    "more",
    [{"provider_specific_fields": {"refusal": None}, "tool_calls": None, "function_call": None},
     {"annotations": [], "audio": None, "tool_calls": []}, {"thinking_blocks": None, "images": None},
     {"reasoning": "hm", "reasoning_content": "hm"}, {"reasoning_content": None}],
)  # fmt: skip
def test_replies_through_other_libraries_too(client, more):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", **more},
                {"role": "user", "content": "Why?"}]  # fmt: skip
    assert client.chat.completions.create(messages=messages, **GREEDY).choices


@pytest.mark.parametrize("more", [{"tool_calls": [{"id": "1"}]}, {"refusal": "no"}, {"audio": {"id": "1"}}])
def test_what_such_a_field_holds_is_not_ignored(client, more):
    messages = [{"role": "assistant", "content": "Ho", **more}]
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(messages=messages, **GREEDY)
    assert e.value.param.startswith(f"messages[0].{next(iter(more))}")


def test_thoughts_reach_the_template():
    message = Message(role="assistant", content="a", reasoning_content="b", reasoning="c", name="d", refusal=None)
    assert message.plain() == {"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "c",
                               "name": "d"}  # fmt: skip


def test_a_context_that_is_too_short_has_a_code_of_its_own(client):
    """By which clients know that they must shorten a conversation."""
    chat = client.chat.completions.create
    for ask in (
        lambda: client.completions.create(prompt="x" * 300, model="tiny"),
        lambda: client.completions.create(prompt=[1] * 300, model="tiny"),
        lambda: client.completions.create(prompt=["a", "x" * 300], model="tiny"),
        lambda: client.completions.create(prompt="x", model="tiny", max_tokens=256),
        lambda: chat(messages=[{"role": "user", "content": "x" * 300}], model="tiny"),
        lambda: chat(messages=[{"role": "user", "content": "x"}], model="tiny", max_completion_tokens=250),
        lambda: client.embeddings.create(input="x" * 300, model="tiny"),
    ):
        with pytest.raises(openai.BadRequestError) as e:
            ask()
        assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(prompt="x", model="tiny", top_p=2)
    assert e.value.code is None


@pytest.mark.parametrize("n", [1, 2])
def test_running_usage_counts_what_the_chunks_hold(client, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "Hi"}]
    chunks = list(client.chat.completions.create(messages=messages, stream=True, n=n, stream_options=options, **GREEDY))
    seen = set()
    for chunk in chunks[:-1]:
        if chunk.choices[0].delta.role and not seen:
            assert chunk.usage.completion_tokens == 0, "the first chunk has no token yet"
        seen.add(chunk.choices[0].index)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [12 * n, 12 * n]


def test_usage_is_told_only_where_it_is_asked_for(client):
    messages = [{"role": "user", "content": "Hi"}]
    without = ({"include_usage": False}, {"include_usage": None}, {}, {"continuous_usage_stats": False},
               {"include_usage": False, "continuous_usage_stats": True})  # fmt: skip
    for options in without:
        chunks = client.chat.completions.create(messages=messages, stream=True, stream_options=options, **GREEDY)
        assert all(c.usage is None for c in chunks)
