"""What a checkpoint or the command line says of a server: default sampling, a prefix of paths, an empty cache."""

import json
import shutil

import pytest
from tests.serve.running import running
from tests.serve.test_reliability import call, error

from ridgeline.serve.checkpoint_settings import Options, sampling_defaults, writes_channels
from ridgeline.spec.errors import UserError

ASK = {"prompt": "abc", "max_tokens": 12, "seed": 3, "ignore_eos": True}
GENERATION = {
    "temperature": 1.3,
    "top_k": 5,
    "repetition_penalty": 1.2,
    "max_new_tokens": 20,
    "transformers_version": "5",
}


@pytest.fixture(scope="module")
def customized(folder, tmp_path_factory):
    """The same model with a ``generation_config.json``, behind a proxy, with keys."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("defaults") / "tiny")
    (copy / "generation_config.json").write_text(json.dumps({**GENERATION, "eos_token_id": 0}))
    with running(copy, keys=["key"], admin=["admin"], root_path="/models/a/", origins=["https://a.example"]) as s:
        yield s


def answer(server, path="/v1/completions", key=None, **more):
    status, _, text = call(server, path, {**ASK, **more}, key=key)
    assert status == 200, text
    made = json.loads(text)
    return made["choices"][0]["text"], made["usage"]


# ---- generation_config.json ------------------------------------------------------------------------------------------


def test_requests_have_the_checkpoints_defaults(customized, server):
    given = {name: GENERATION[name] for name in ("temperature", "top_k", "repetition_penalty")}
    plain = answer(server)
    with_defaults = answer(customized, key="key")
    assert with_defaults == answer(server, **given)
    assert with_defaults[0] != plain[0]
    assert answer(customized, key="key", temperature=1.0, top_k=-1, repetition_penalty=1.0)[0] == plain[0]
    assert answer(customized, key="key", max_tokens=50)[1]["completion_tokens"] == 20
    beams = {"use_beam_search": True, "seed": None}
    assert answer(customized, key="key", **beams)[0] == answer(server, **beams)[0]


def test_where_defaults_come_from(tmp_path):
    assert sampling_defaults(tmp_path, "auto", 9) == ({}, None)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(GENERATION))
    found = {"temperature": 1.3, "top_k": 5, "repetition_penalty": 1.2}
    assert sampling_defaults(tmp_path, "auto", 9) == (found, 20)
    assert sampling_defaults(tmp_path / "none", str(tmp_path), 9) == (found, 20)
    assert sampling_defaults(tmp_path, "vllm", 9) == ({}, None)
    with pytest.raises(UserError, match="there is no"):
        sampling_defaults(tmp_path, str(tmp_path / "none"), 9)
    for wrong in ({"top_p": 3}, {"temperature": "hot"}, {"max_new_tokens": 0}, {"top_k": "50"},
                  {"top_k": 5.5}, {"max_new_tokens": 5.5}, {"temperature": True}):  # fmt: skip
        file.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="--generation-config vllm"):
            sampling_defaults(tmp_path, "auto", 9)
    assert Options().generation_config == "auto"


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_paths_with_and_without_their_prefix(customized):
    for prefix in ("", "/models/a"):
        assert call(customized, f"{prefix}/health")[0] == 200
        assert call(customized, f"{prefix}/v1/models/")[0] == 401
        assert json.loads(call(customized, f"{prefix}/v1/models", key="key")[2])["data"][0]["id"] == "tiny"
    assert call(customized, "/models/ab/health", key="key")[0] == 404
    described = json.loads(call(customized, "/models/a/openapi.json", key="key")[2])
    assert described["servers"] == [{"url": "/models/a"}]


@pytest.mark.parametrize("prefix", ["", "/models/a", "/models/a/models/a"])
def test_a_prefix_leads_around_no_key(customized, prefix):
    for path in ("/reset_prefix_cache", "/v1/load_lora_adapter"):
        assert call(customized, prefix + path, {}, key="key")[0] in (401, 404)
        assert call(customized, prefix + path, {})[0] == 401


def test_a_prefix_begins_with_a_slash(server):
    from ridgeline.serve.app import create_app

    with pytest.raises(UserError, match="slash"):
        create_app(server.service, root_path="models")


def test_browsers_may_ask_for_pages_of_named_origins(customized, server):
    def asked(where, origin, method="OPTIONS", **more):
        headers = {"origin": origin, "access-control-request-method": "POST",
                   "access-control-request-headers": "authorization,content-type", **more}  # fmt: skip
        status, found, _ = call(where, "/v1/completions" if method == "OPTIONS" else "/v1/models", method=method,
                                headers=headers)  # fmt: skip
        return status, found.get("access-control-allow-origin")

    assert asked(customized, "https://a.example") == (200, "https://a.example")
    assert asked(customized, "https://b.example") == (400, None)
    assert asked(customized, "https://a.example", "GET", authorization="Bearer key") == (200, "https://a.example")
    assert asked(customized, "https://a.example", "GET") == (401, "https://a.example")
    assert asked(server, "https://a.example")[1] is None


# ---- the cache of prompts --------------------------------------------------------------------------------------------


def test_the_cache_is_emptied(customized, server):
    prompt = "a prompt that is longer than two blocks of the cache"
    first = answer(customized, key="key", prompt=prompt)
    cached = answer(customized, key="key", prompt=prompt)
    assert first[0] == cached[0]
    assert cached[1]["prompt_tokens_details"]["cached_tokens"] >= 32
    status, _, text = call(customized, "/reset_prefix_cache", method="POST", key="admin")
    assert (status, json.loads(text)["freed_blocks"] >= 2) == (200, True)
    assert customized.engine.stats().blocks_cached == 0
    fresh, again = (answer(customized, key="key", prompt=prompt) for _ in range(2))
    assert (fresh[0], fresh[1]["prompt_tokens_details"]["cached_tokens"]) == (first[0], 0)
    assert again[1]["prompt_tokens_details"]["cached_tokens"] >= 32
    customized.assert_idle()
    status, _, text = call(server, "/reset_prefix_cache", method="POST")
    assert (status, "admin key" in error(text)["message"]) == (403, True)


@pytest.mark.parametrize(("config", "options", "expected"), [
    ({"model_type": "gpt_oss"}, Options(), True), ({"model_type": "llama"}, Options(), False), ({}, Options(), False),
    ({"model_type": "gpt_oss"}, Options(tool_parser="hermes"), False),
    ({}, Options(reasoning_parser="openai_gptoss"), True), ({}, Options(tool_parser="openai"), True),
])  # fmt: skip
def test_who_writes_in_channels(tmp_path, config, options, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert writes_channels(tmp_path, options) is expected
    with pytest.raises(UserError, match="one format"):
        writes_channels(tmp_path, Options(tool_parser="openai", reasoning_parser="qwen3"))
