"""What the server does when clients, load, or the engine itself misbehave."""

import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from tests.serve import malformed
from tests.serve.running import lora, running
from tests.serve.traffic import KINDS, LEFT, Traffic, hammer

from ridgeline.serve.queue_limits import QueueLimits

LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}


def call(server, path, body=None, method=None, key=None, raw=None, headers=None):
    """(status, headers, text) of one request."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    headers = {"content-type": "application/json", **(headers or {})}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, {k.lower(): v for k, v in reply.getheaders()}, text


def error(text):
    return json.loads(text)["error"]


def opened(server, body, path="/v1/completions"):
    """A socket that has sent a request."""
    host, port = urlsplit(server.url).netloc.split(":")
    s = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    s.sendall(head.encode() + data)
    return s


class Held:
    """Lets the engine take no step before it is left; the real step comes back afterwards."""

    def __init__(self, engine):
        self.engine, self.real, self.free = engine, engine.step, threading.Event()

    def __enter__(self):
        def step():
            self.free.wait()
            return self.real()

        self.engine.step = step

    def __exit__(self, *failure):
        self.engine.step = self.real
        self.free.set()


class Slow:
    """Makes each of the engine's steps last; entered with the real step afterwards."""

    def __init__(self, engine, seconds):
        self.engine, self.seconds, self.real = engine, seconds, engine.step

    def __enter__(self):
        def step():
            time.sleep(self.seconds)
            return self.real()

        self.engine.step = step

    def __exit__(self, *_):
        self.engine.step = self.real


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"prompt": "x" * 300}, "prompt", "300 tokens, and the model's maximum context length is 256"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": "\ud800"}, "prompt", "unicode"),
        ({"prompt": [999]}, "prompt", "out of vocabulary"),
        ({"prompt": [999], "echo": True}, "prompt", "out of vocabulary"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 256}, "max_tokens", "exceeds the context of 256"),
        ({"temperature": -1}, "temperature", "outside"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "outside"),
        ({"n": 0}, "n", "outside"),
        ({"n": 3, "best_of": 2}, "best_of", "outside"),
        ({"best_of": 2, "use_beam_search": True, "n": 3}, "n", "3 outputs of 2 beams"),
        ({"length_penalty": 1e308, "use_beam_search": True}, "length_penalty", "outside"),
        ({"length_penalty": 2.0}, "length_penalty", "use_beam_search"),
        ({"stop": [""]}, "stop[0]", "1 character"),
        ({"stop": ["a"] * 17}, "stop", "16 items"),
        ({"logit_bias": {"999": 1.0}}, "logit_bias", "token 999"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias", "no token ids"),
        ({"logprobs": 21}, "logprobs", "of 20 at most"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream only"),
        ({"guided_regex": "a"}, "guided_regex", "unknown field 'guided_regex': give structured_outputs.regex"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be compiled"),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "second",
        ),
        ({"suffix": "x"}, "suffix", "needs a model with tokens for a gap"),
        ({"tools": []}, "tools", "unknown field"),
    ],
)
def test_a_mistake_is_told_with_its_field(server, change, param, said):
    status, _, text = call(server, "/v1/completions", {"prompt": "a", **change})
    assert status == 400, text
    assert error(text)["param"] == param
    assert said in error(text)["message"]
    assert set(error(text)) == {"message", "type", "param", "code"}


def test_wrong_chats(server):
    for change, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 300}, "max_completion_tokens"),
    ):
        body = {"messages": [{"role": "user", "content": "a"}], **change}
        status, _, text = call(server, "/v1/chat/completions", body)
        assert (status, error(text)["param"]) == (400, param)


def test_random_malformed_requests_neither_break_nor_leak(server):
    for seed in range(300):
        method, path, raw, headers = malformed.request(seed)
        status, _, text = call(server, path, method=method, raw=raw, headers=headers)
        assert status in (200, 400, 401, 403, 404, 405), (seed, status, text)
        if status >= 400:
            assert error(text)["message"], seed
    server.assert_idle()


# ---- keys and sizes ------------------------------------------------------------------------------------------------


def test_keys(folder):
    with running(folder, keys=["k1", "k2"], admin=["boss"], max_body=2000) as server:
        assert call(server, "/health")[0] == call(server, "/ready")[0] == 200
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert call(server, path)[0] == 401
            assert call(server, path, key="k3")[0] == 401
            assert call(server, path, key="k2")[0] == 200
        adapter = {"lora_name": "x", "lora_path": "/nowhere"}
        assert call(server, "/v1/load_lora_adapter", adapter, key="k1")[0] == 401
        assert call(server, "/v1/load_lora_adapter", adapter, key="boss")[0] == 404
        assert call(server, "/v1/completions", {"prompt": "x" * 3000}, key="k1")[0] == 413
        chunked = iter([b"x" * 1500, b"x" * 1500])
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        connection.request("POST", "/v1/completions", chunked, {"authorization": "Bearer k1"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        # Clients do not learn from timing what others have asked.
        prompt = {"prompt": "a prompt that is longer than two blocks of the cache", "max_tokens": 1}

        def cached(key):
            usage = json.loads(call(server, "/v1/completions", prompt, key=key)[2])["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached("k1"), cached("k2"), cached("k1")] == [0, 0, 48]


# ---- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_frees_its_blocks(server, stream, n):
    before, made = server.loop.metrics.disconnected._value.get(), server.engine.outputs.generated
    with Slow(server.engine, 0.05):  # ten seconds to the end
        s = opened(server, {**LONG, "stream": stream, "n": n})
        server.wait(lambda: server.engine.blocks.used > 0)
        if stream:
            assert b"data: " in s.recv(4096) + s.recv(4096)
        s.close()
        server.wait(lambda: server.engine.blocks.used == 0)
    server.assert_idle()
    assert server.engine.outputs.generated - made < n * LONG["max_tokens"]  # it did not run to its end
    assert server.loop.metrics.disconnected._value.get() == before + 1


def test_a_client_that_leaves_while_it_waits(folder):
    with running(folder, max_num_seqs=1) as server, Slow(server.engine, 0.05):
        first = opened(server, LONG)
        server.wait(lambda: server.loop.stats.running == 1)
        (runs,) = server.engine.groups
        second = opened(server, LONG)
        server.wait(lambda: server.loop.stats.waiting == 1)
        second.close()
        server.wait(lambda: len(server.engine.groups) == 1)
        assert [*server.engine.groups] == [runs]
        first.close()
        server.assert_idle()


def test_a_silent_stream_pings(server, monkeypatch):
    monkeypatch.setattr("ridgeline.serve.http.PING_SECONDS", 0.05)
    with Slow(server.engine, 0.2):
        _, headers, text = call(server, "/v1/completions", {**LONG, "max_tokens": 2, "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    lines = [line for line in text.split("\n") if line]
    assert ": ping" in lines
    assert lines[-1] == "data: [DONE]"
    assert all(line == ": ping" or line.startswith("data: ") for line in lines)


# ---- load ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_everybody_else_is_served(folder):
    with running(folder, limits=QueueLimits(queued_requests=3), max_num_seqs=2) as server:
        results = []

        def one(i):
            results.append(call(server, "/v1/completions", {**LONG, "prompt": f"{i}", "max_tokens": 20}))

        with Slow(server.engine, 0.02):
            threads = [threading.Thread(target=one, args=(i,)) for i in range(24)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        statuses = [status for status, _, _ in results]
        assert set(statuses) == {200, 503}
        for status, headers, text in results:
            if status == 503:
                assert int(headers["retry-after"]) >= 1
                assert "queue is full" in error(text)["message"]
        server.assert_idle()
        assert f"ridgeline_requests_rejected_total {statuses.count(503)}.0" in call(server, "/metrics")[2]


def test_who_waits_too_long_is_told(folder):
    with running(folder, max_num_seqs=1) as server, Slow(server.engine, 0.02):
        holder = opened(server, LONG)
        server.wait(lambda: server.loop.stats.running == 1 and server.loop.queued == (0, 0))
        server.loop.limits = QueueLimits(first_token=0.3)  # which a busy machine may need longer for, before
        status, headers, text = call(server, "/v1/completions", {"prompt": "b"})
        assert status == 503
        assert "no token within 0.3 s" in error(text)["message"]
        assert "retry-after" in headers
        holder.close()
        server.assert_idle()


def test_a_small_pool_preempts_and_all_say_what_they_say_alone(folder):
    bodies = [{**LONG, "prompt": f"{i} " * 8, "max_tokens": 60} for i in range(6)]
    with running(folder, kv_cache_bytes=70_000) as server:
        alone = [json.loads(call(server, "/v1/completions", b)[2])["choices"][0]["text"] for b in bodies]
        together: dict[int, str] = {}

        def one(i):
            together[i] = json.loads(call(server, "/v1/completions", bodies[i])[2])["choices"][0]["text"]

        threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
        with Held(server.engine):  # or a fast engine has answered the first before the last arrives
            for t in threads:
                t.start()
            server.wait(lambda: server.loop.queued[0] == 6)
        for t in threads:
            t.join()
        assert [together[i] for i in range(6)] == alone
        assert server.engine.stats().preemptions > 0
        server.assert_idle()


# ---- the engine ----------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_fails_everybody_clearly(folder):
    with running(folder) as server:
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(call(server, "/v1/completions", LONG))) for _ in range(3)
        ]
        with Slow(server.engine, 0.02):
            for t in threads:
                t.start()
            server.wait(lambda: len(server.engine.groups) == 3)

            def broken():
                raise RuntimeError("the kernel is gone")

            server.engine.step = broken
            for t in threads:
                t.join(60)
        assert [status for status, _, _ in results] == [500] * 3
        assert all("engine failed" in error(text)["message"] for _, _, text in results)
        server.thread.join(60)  # the server ends by itself
        assert not server.thread.is_alive()
        assert isinstance(server.loop.failure, RuntimeError)


def test_a_step_that_hangs_is_ill_health(folder):
    with running(folder, limits=QueueLimits(stall=0.2)) as server:
        with Slow(server.engine, 0.8):
            s = opened(server, LONG)
            for path in ("/health", "/ready"):
                server.wait(lambda path=path: call(server, path)[0] == 503)
            s.close()
        server.wait(lambda: call(server, "/health")[0] == 200)


def test_metrics_are_prometheus_text_and_add_up(folder):
    from prometheus_client.parser import text_string_to_metric_families

    with running(folder) as server:
        for _ in range(3):
            call(server, "/v1/completions", {**LONG, "prompt": "x" * 50, "max_tokens": 5})
        _, headers, text = call(server, "/metrics")
        assert headers["content-type"].startswith("text/plain")
        samples = {
            (s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples
        }
        assert samples["ridgeline_output_tokens_total",] == 15
        assert samples["ridgeline_generated_tokens_total",] == 15
        assert samples["ridgeline_time_to_first_token_seconds_count",] == 3
        assert samples["ridgeline_requests_finished_total", "length"] == 3
        assert samples["ridgeline_kv_blocks_used",] == 0
        model = server.service.name
        assert samples["vllm:generation_tokens_total", model] == 15
        prompts = samples["vllm:request_prompt_tokens_sum", model]
        assert (
            samples["vllm:prefix_cache_queries_total", model] == samples["vllm:prompt_tokens_total", model] == prompts
        )
        assert 0 < samples["vllm:prefix_cache_hits_total", model] < prompts
        assert samples["vllm:request_success_total", "length", model] == 3
        assert samples["vllm:time_to_first_token_seconds_bucket", "+Inf", model] == 3
        assert samples["vllm:num_requests_running", model] == samples["vllm:kv_cache_usage_perc", model] == 0
        counts = {name for name, *_ in samples if name.startswith("vllm:") and name.endswith("_count")}
        assert len(counts) == 16
        for name in counts - {"vllm:inter_token_latency_seconds_count", "vllm:iteration_tokens_total_count"}:
            assert samples[name, model] == 3, name
        assert samples["vllm:inter_token_latency_seconds_count", model] == 3 * 4
        assert samples["vllm:request_params_max_tokens_sum", model] == 15
        assert samples["vllm:iteration_tokens_total_sum", model] == prompts + 15
        assert samples["vllm:request_prefill_time_seconds_sum", model] > 0
        whole = samples["vllm:e2e_request_latency_seconds_sum", model]
        parts = ("queue", "prefill", "decode")
        assert sum(samples[f"vllm:request_{p}_time_seconds_sum", model] for p in parts) == pytest.approx(whole)
        assert samples["vllm:num_requests_waiting_by_reason", model, "capacity"] == 0
        assert any(name == "vllm:cache_config_info" for name, *_ in samples)


def test_tokenize_and_back(server):
    text = "thé 猫"
    tokens = json.loads(call(server, "/tokenize", {"prompt": text})[2])["tokens"]
    assert json.loads(call(server, "/detokenize", {"tokens": tokens})[2])["prompt"] == text
    chat = json.loads(call(server, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})[2])
    assert json.loads(call(server, "/detokenize", {"tokens": chat["tokens"]})[2])["prompt"] == "<user>hi\n<assistant>"


def test_mixed_traffic_leaves_nothing(folder, tmp_path):
    """What ``benchmarks/serve_soak.py`` sends for an hour, for a moment."""
    with running(folder, plan=["multi_adapter"], admin=["boss"], kv_cache_bytes=40 * 4096, max_num_seqs=16) as server:
        adapters = [lora(tmp_path / str(seed), server.engine.model, seed) for seed in range(2)]
        traffic = Traffic(server.url, adapters, "boss")
        hammer(150, 6, traffic.send)
        assert set(traffic.statuses) <= {LEFT, 200, 400, 401, 404, 405}, traffic.statuses
        assert set(traffic.kinds) == set(KINDS)
        server.wait(lambda: not server.engine.has_work() and not server.loop.open_streams)
        traffic.unload_all()
        server.assert_idle()
        assert server.engine.blocks.free == server.engine.blocks.count
