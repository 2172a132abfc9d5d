"""Client libraries that are installed, as their users call them: text, streams, calls of functions, structures."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module

import openai
import pytest
from pydantic import BaseModel
from tests.serve.test_tools import SOURCE, tools  # noqa: F401 (a fixture)

ASK = "Hi"
BIAS = {"0": -100}
"""Against an end at once, as a model of random weights may have it."""


TOOL = {"type": "function", "function": {"name": "now", "description": "The time",
                                         "parameters": {"type": "object", "properties": {}}}}  # fmt: skip


class City(BaseModel):
    """A structure small enough for a context of 256 tokens."""

    capital: bool


@pytest.fixture
def asked(server, tools):  # noqa: F811
    """The server's address, and the text that it continues a greeting with."""
    tools("hermes", None, SOURCE)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": ASK}], temperature=0, max_tokens=8, logit_bias=BIAS
        )
    return server.url, made.choices[0].message.content


def needs(name):
    """A module, where it is installed."""
    return pytest.importorskip(name, exc_type=ImportError)


def test_anthropic(asked):
    url, _ = asked
    talk = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": ASK}],
            "extra_body": {"temperature": 0}}  # fmt: skip
    tool = {"name": "now", "description": "The time", "input_schema": {"type": "object", "properties": {}}}
    with needs("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        made = client.messages.create(**talk)
        with client.messages.stream(**talk) as stream:
            assert "".join(stream.text_stream) == made.content[0].text
            assert stream.get_final_message().usage.output_tokens == made.usage.output_tokens
        assert client.messages.count_tokens(model="tiny", messages=talk["messages"]).input_tokens > 0
        more = {**talk, "max_tokens": 120, "tools": [tool], "tool_choice": {"type": "tool", "name": "now"}}
        called = client.messages.create(**more)
        assert (called.stop_reason, called.content[0].name, called.content[0].input) == ("tool_use", "now", {})
        with pytest.raises(import_module("anthropic").BadRequestError, match="max_tokens"):
            client.messages.create(**{**talk, "max_tokens": 9999})


def test_langchain(asked):
    url, text = asked
    chat = needs("langchain_openai").ChatOpenAI(
        base_url=url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=8, max_retries=0,
        extra_body={"logit_bias": BIAS},
    )  # fmt: skip
    assert chat.invoke(ASK).content == text
    assert "".join(part.content for part in chat.stream(ASK)) == text

    def now() -> str:
        """The time."""

    bound = chat.bind_tools([now], tool_choice="now")
    assert bound.invoke(ASK, max_tokens=120).tool_calls[0]["name"] == "now"
    structured = chat.bind(max_tokens=120).bound.with_structured_output(City, method="json_schema")
    assert isinstance(structured.invoke(ASK, max_tokens=120).capital, bool)


def test_instructor(asked):
    url, _ = asked
    instructor = needs("instructor")
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            made = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": ASK}], response_model=City, max_tokens=120,
                max_retries=0,
            )  # fmt: skip
            assert isinstance(made.capital, bool)


def test_litellm(asked):
    url, text = asked
    completion = needs("litellm").completion
    talk = {"model": "openai/tiny", "api_base": url + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 8,
            "messages": [{"role": "user", "content": ASK}], "logit_bias": BIAS}  # fmt: skip
    made = completion(**talk)
    assert made.choices[0].message.content == text
    assert "".join(c.choices[0].delta.content or "" for c in completion(**talk, stream=True)) == text
    talk["messages"] += [made.choices[0].message, {"role": "user", "content": "So"}]  # as it came
    assert completion(**talk).choices[0].finish_reason in ("stop", "length")
    named = {"type": "function", "function": {"name": "now"}}
    more = {**talk, "max_tokens": 60, "tools": [TOOL], "tool_choice": named}
    message = completion(**more).choices[0].message
    (made,) = message.tool_calls
    assert (made.function.name, made.function.arguments) == ("now", "{}")
    more["messages"] = [*talk["messages"], message, {"role": "tool", "tool_call_id": made.id, "content": "5"}]
    assert completion(**{**more, "tool_choice": "none"}).choices[0].finish_reason in ("stop", "length")


def test_llama_index(asked):
    url, text = asked
    kind = needs("llama_index.llms.openai_like").OpenAILike
    function = import_module("llama_index.core.tools").FunctionTool
    said = import_module("llama_index.core.llms").ChatMessage
    options = {"model": "tiny", "api_base": url + "/v1", "api_key": "none", "max_retries": 0, "temperature": 0,
               "is_chat_model": True, "is_function_calling_model": True, "context_window": 256}  # fmt: skip
    chat = kind(**options, max_tokens=8, additional_kwargs={"logit_bias": BIAS})
    assert chat.complete(ASK).text == text
    assert chat.chat([said(role="user", content=ASK)]).message.content == text
    assert "".join(part.delta or "" for part in chat.stream_chat([said(role="user", content=ASK)])) == text
    assert asyncio.run(chat.achat([said(role="user", content=ASK)])).message.content == text

    def now() -> str:
        """The time."""

    tool = function.from_defaults(now)
    chat = kind(**options, max_tokens=120)
    answer = chat.chat_with_tools([tool], ASK, tool_required=True)
    assert chat.get_tool_calls_from_response(answer)[0].tool_name == "now"
    vectors = needs("llama_index.embeddings.openai_like").OpenAILikeEmbedding(
        model_name="tiny", api_base=url + "/v1", api_key="none", max_retries=0
    )
    assert len(vectors.get_text_embedding(ASK)) == len(vectors.get_query_embedding("b"))


def test_pydantic_ai(asked):
    url, text = asked
    agent_of = needs("pydantic_ai").Agent
    models = import_module("pydantic_ai.models.openai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=url + "/v1", api_key="none")
    kind = getattr(models, "OpenAIChatModel", None) or models.OpenAIModel
    settings = {"temperature": 0.0, "max_tokens": 8, "logit_bias": BIAS}
    agent = agent_of(kind("tiny", provider=provider), model_settings=settings)
    assert agent.run_sync(ASK).output == text


def test_openai_agents(asked):
    url, text = asked
    agents = needs("agents")
    agents.set_tracing_disabled(True)

    async def run() -> tuple[object, object]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            short = agents.ModelSettings(temperature=0, max_tokens=8, extra_body={"logit_bias": BIAS})
            chat = agents.Agent(name="a", model=agents.OpenAIChatCompletionsModel("tiny", client), model_settings=short)
            long = agents.ModelSettings(temperature=0, max_tokens=120)
            kind = agents.OpenAIResponsesModel("tiny", client)
            structured = agents.Agent(name="a", model=kind, model_settings=long, output_type=City)
            return tuple([(await agents.Runner.run(agent, ASK)).final_output for agent in (chat, structured)])

    said, made = asyncio.run(run())
    assert said == text
    assert isinstance(made, City)


def test_aiperf(server, folder, tmp_path):
    """A load of completions, which streams and reports as it does of other servers. aiperf takes tokenizers by their
    names on a hub only: here from a hub's cache."""
    needs("aiperf")
    known, revision = tmp_path / "hub" / "models--tests--tiny", "0" * 40
    (known / "refs").mkdir(parents=True)
    (known / "refs" / "main").write_text(revision)
    snapshot = known / "snapshots" / revision
    shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    if not (snapshot / "tokenizer_config.json").exists():
        (snapshot / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    command = [sys.executable, "-m", "aiperf", "profile", "--model", "tiny", "--url", server.url, "--endpoint-type",
               "completions", "--streaming", "--request-count", "12", "--concurrency", "3", "--ui", "simple",
               "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true",
               "--tokenizer", "tests/tiny", "--output-artifact-dir", str(tmp_path / "out")]  # fmt: skip
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 12
    assert report["time_to_first_token"]["avg"] > 0
    assert not report.get("error_request_count") or report["error_request_count"]["avg"] == 0


def test_the_official_client_without_waiting(asked):
    url, text = asked
    talk = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_tokens": 8}

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            made = await asyncio.gather(
                *(client.chat.completions.create(**talk, logit_bias=BIAS) for _ in range(3)),
                client.chat.completions.parse(**{**talk, "max_tokens": 120}, response_format=City),
            )
            streamed = ""
            async for chunk in await client.chat.completions.create(**talk, logit_bias=BIAS, stream=True):
                streamed += chunk.choices[0].delta.content or ""
            assert isinstance(made[-1].choices[0].message.parsed, City)
            assert json.loads(made[-1].choices[0].message.content).keys() == {"capital"}
            return [streamed, *(one.choices[0].message.content for one in made[:-1])]

    assert set(asyncio.run(run())) == {text}
