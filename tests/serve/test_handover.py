"""``kv_transfer_params``: a proxy of vLLM's hands what a prefill server answers to a decode server."""

import json

import pytest
from tests.serve.running import CONTEXT, Running
from tests.serve.test_reliability import call, error

from ridgeline.cli.serve import _join
from ridgeline.serve.transfer.member import MemberOptions

SECRET = b"a secret of the tests"
PLAIN = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, **PLAIN}
"""What vLLM's proxies send to the first server."""
PROMPT = "".join(chr(97 + i % 26) for i in range(100))


@pytest.fixture(scope="module")
def pair(folder):
    """A prefill server and a decode server."""
    servers, transfers = [], []
    try:
        for role in ("prefill", "decode"):
            s = Running(folder, plan=[f"splitwise:role={role},whole_below=1"])
            servers.append(s)
            options = MemberOptions(SECRET, "127.0.0.1", 0, None, lambda line: None, 60.0)
            transfers.append(_join(s.loop, s.engine, options))
            s.start()
        yield servers
    finally:
        for s in servers:
            s.stop()
        for t in transfers:
            t.close()


def asked(server, path="/v1/completions", **body):
    status, _, text = call(server, path, {"max_tokens": 6, "temperature": 0, **body})
    assert status == 200, text
    return json.loads(text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_proxy_hands_the_prompt_on(pair, server, stream):
    prefill, decode = pair
    prompt = PROMPT[int(stream) :]
    first = asked(prefill, prompt=prompt, kv_transfer_params=ASKED, max_tokens=1)
    handed = first["kv_transfer_params"]
    assert handed["do_remote_prefill"] is True
    before = decode.engine.stats().prompt_tokens
    body = {"prompt": prompt, "kv_transfer_params": handed}
    if stream:
        _, _, text = call(decode, "/v1/completions", {**body, "max_tokens": 6, "temperature": 0, "stream": True})
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        made = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    else:
        made = asked(decode, **body)["choices"][0]["text"]
    assert made == asked(server, prompt=prompt)["choices"][0]["text"]
    assert decode.engine.stats().prompt_tokens == before  # all of it came from the other server
    for s in pair:
        s.assert_idle()


def test_a_stream_hands_over_at_its_end(pair):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    _, _, text = call(pair[0], "/v1/chat/completions", {**body, "kv_transfer_params": ASKED})
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [bool(c.get("kv_transfer_params")) for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_only_what_a_server_of_the_fleet_has_signed_is_believed(pair):
    prefill, decode = pair
    handed = asked(prefill, prompt="ab", kv_transfer_params=ASKED, max_tokens=1)["kv_transfer_params"]
    for change in ({"remote_host": "10.0.0.1"}, {"remote_port": 1}, {"remote_signature": None}):
        status, _, text = call(decode, "/v1/completions", {"prompt": "ab", "kv_transfer_params": {**handed, **change}})
        assert (status, error(text)["param"]) == (400, "kv_transfer_params")
        assert "signed" in error(text)["message"]


def test_servers_that_exchange_nothing(server):
    for given in ({}, {**ASKED, "do_remote_decode": False}, {"transfer_id": "of another connector"}):
        assert "kv_transfer_params" not in asked(server, prompt="ab", kv_transfer_params=given)
    for given, said in ((ASKED, "--role"), ({"do_remote_prefill": True}, "--role"),
                        ({"prompt_token_ids": [1]}, "prompt_token_ids")):  # fmt: skip
        status, _, text = call(server, "/v1/completions", {"prompt": "ab", "kv_transfer_params": given})
        assert (status, error(text)["param"]) == (400, "kv_transfer_params")
        assert said in error(text)["message"]


def test_a_conversation_that_was_tokenized_before(server):
    talk = [{"role": "user", "content": "Hi"}]
    options = {"path": "/v1/chat/completions", "return_token_ids": True}
    first = asked(server, messages=talk, **options)
    other = [{"role": "user", "content": "Something else"}]
    again = asked(server, messages=other, kv_transfer_params={"prompt_token_ids": first["prompt_token_ids"]}, **options)
    assert again["prompt_token_ids"] == first["prompt_token_ids"]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    for ids, param in (([999], "kv_transfer_params"), ([1] * (CONTEXT + 1), "kv_transfer_params.prompt_token_ids")):
        body = {"messages": talk, "kv_transfer_params": {"prompt_token_ids": ids}}
        status, _, text = call(server, "/v1/chat/completions", body)
        assert (status, error(text)["param"]) == (400, param)
    assert error(text)["code"] == "context_length_exceeded"
