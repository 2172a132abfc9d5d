"""An engine in a process of its own serves what one in the server's process does, and neither outlives the other."""

import json
import select
import signal
import sys
import threading
import time
from functools import partial

import psutil
import pytest
from tests.forked import engine_apart
from tests.serve import apart
from tests.serve.running import lora, process, running
from tests.serve.test_reliability import LONG, call, error, opened
from tests.serve.test_sleep import KEY
from tests.serve.test_tools import ASK, TOOLS

from ridgeline import cli
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
from ridgeline.serve.checkpoint_settings import Options
from ridgeline.serve.queue_limits import QueueLimits
from ridgeline.serve.remote_engine import EngineLost, RemoteEngine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.errors import UserError

SCHEMA = {"type": "object", "required": ["a", "b"], "additionalProperties": False,
          "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}  # fmt: skip
DRAWN = {"temperature": 1.0, "seed": 7}
OPTIONS = Options(tool_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return lora(tmp_path_factory.mktemp("adapters") / "own", load_checkpoint(folder))


@pytest.fixture(scope="module")
def servers(folder):
    """The same in one process, and in two."""
    options = {"admin": ["admin"], "plan": ["multi_adapter"], "options": OPTIONS}
    with running(folder, **options) as one, running(folder, apart=True, **options) as two:
        yield one, two


@pytest.fixture
def server(servers):
    return servers[1]


@pytest.fixture(scope="module")
def slow(folder):
    """Slow, so that tests see requests on their way, and soon ill where a step lasts."""
    with running(folder, apart=apart.picky, admin=["admin"], limits=QueueLimits(stall=0.5)) as s:
        yield s


def loading(folder):
    return partial(load_engine, folder, DEFAULT_PLAN, kv_cache_bytes=1 << 20, max_num_batched_tokens=64)


def answers(servers, path, body):
    """What both say, without names and times."""
    found = []
    for server in servers:
        status, _, text = call(server, path, body)
        answer = json.loads(text)
        for of in (answer, *answer.get("choices", ())):
            of.pop("id", None), of.pop("created", None)
            for made in of.get("message", {}).get("tool_calls") or ():
                made.pop("id")
        found.append((status, answer))
    return found


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0},
        {"n": 3},
        {"prompt": ["a", "bb", "ccc"], "n": 2},
        {"logprobs": 5, "n": 2},
        {"prompt_logprobs": 2},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"stop": ["e", "th"], "n": 4, "max_tokens": 100},
        {"stop": ["e"], "include_stop_str_in_output": True, "logprobs": 1},
        {"best_of": 4, "n": 2, "stop": ["e", "a"]},
        {"best_of": 3, "n": 2, "logprobs": 1},
        {"use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0, "seed": None},
        {"structured_outputs": {"json": SCHEMA}, "max_tokens": 80},
        {"structured_outputs": {"regex": "[ab]{3,9}"}, "n": 3},
        {"structured_outputs": {"choice": ["red", "green"]}, "best_of": 3},
        {"bad_words": ["e"], "logit_bias": {"70": 5}, "min_tokens": 4, "stop_token_ids": [70, 71]},
        {"prompt": [5, 6, 7], "repetition_penalty": 1.3, "min_p": 0.01, "top_k": 20, "top_p": 0.8},
        {"return_token_ids": True, "ignore_eos": True},
        {"prompt": "x" * 400},
        {"prompt": [999]},
        {"model": "another"},
    ],
    ids=lambda change: " ".join(change),
)
def test_completions_are_the_same(servers, change):
    body = {"prompt": "Hello there, the cat", "max_tokens": 30, **DRAWN, **change}
    one, two = answers(servers, "/v1/completions", body)
    assert one == two
    assert one[0] == (404 if "model" in change else 400 if change.get("prompt") in ("x" * 400, [999]) else 200)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"logprobs": True, "top_logprobs": 4, "n": 2},
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120},
        {"thinking_token_budget": 5, "max_tokens": 60},
        {"thinking_token_budget": 3, "structured_outputs": {"json": SCHEMA}, "max_tokens": 90},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["e"]},
    ],
    ids=lambda change: " ".join(change),
)
def test_chats_are_the_same(servers, change):
    body = {"messages": ASK, "max_tokens": 20, **DRAWN, **change}
    if not change.get("stream"):
        one, two = answers(servers, "/v1/chat/completions", body)
        assert one == two
        assert one[0] == 200
        return
    found = []
    for server in servers:  # chunks may be cut elsewhere
        lines = call(server, "/v1/chat/completions", body)[2].split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        texts, ends = {}, {}
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            said = choice["delta"].get("content") or choice["delta"].get("reasoning") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
        found.append((texts, ends, chunks[-1]["usage"]))
    assert found[0] == found[1]


def test_embeddings_are_the_same(servers):
    one, two = answers(servers, "/v1/embeddings", {"input": ["a", "the cat", "x" * 90], "model": "tiny"})
    assert one == two
    assert one[0] == 200


def test_many_at_once_say_what_they_say_alone(server):
    bodies = [{"prompt": f"{i} " * (1 + i % 7), "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": i,
               "stop": ["q", "zz"] if i % 3 else []} for i in range(12)]  # fmt: skip
    alone = [json.loads(call(server, "/v1/completions", b)[2])["choices"] for b in bodies]
    together = [None] * len(bodies)

    def one(i):
        together[i] = json.loads(call(server, "/v1/completions", bodies[i])[2])["choices"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone
    server.assert_idle()


# ---- between two steps -----------------------------------------------------------------------------------------------


def test_adapters_come_and_go(servers, adapter):
    named, said = {"lora_name": "own", "lora_path": str(adapter)}, {}
    for server in servers:
        body = {"prompt": "The cat", "max_tokens": 9, "temperature": 0, "model": "own"}
        assert call(server, "/v1/completions", body)[0] == 404
        assert call(server, "/v1/load_lora_adapter", named, headers=KEY)[0] == 200
        said[server] = json.loads(call(server, "/v1/completions", body)[2])["choices"]
        status, _, text = call(server, "/v1/load_lora_adapter", {**named, "lora_name": "x", "lora_path": "/tmp"},
                               headers=KEY)  # fmt: skip
        assert (status, "adapter" in error(text)["message"]) == (400, True)
        assert call(server, "/v1/unload_lora_adapter", {"lora_name": "own"}, headers=KEY)[0] == 200
        assert call(server, "/v1/completions", body)[0] == 404
    assert said[servers[0]] == said[servers[1]]


def test_it_sleeps_and_wakes(server, adapter):
    body = {"prompt": "The cat", "max_tokens": 9, "temperature": 0, "model": "own"}
    named = {"lora_name": "own", "lora_path": str(adapter)}
    assert call(server, "/v1/load_lora_adapter", named, headers=KEY)[0] == 200
    before = json.loads(call(server, "/v1/completions", body)[2])["choices"]
    for _ in range(2):
        assert call(server, "/sleep", {}, headers=KEY)[0] == 200
        assert call(server, "/v1/completions", body)[0] == 503
        assert call(server, "/health")[0] == 200
        assert call(server, "/wake_up", {}, headers=KEY)[0] == 200
        assert json.loads(call(server, "/v1/completions", body)[2])["choices"] == before
    assert call(server, "/v1/unload_lora_adapter", {"lora_name": "own"}, headers=KEY)[0] == 200


def test_it_does_not_sleep_before_the_last_answer_is_sent(server, monkeypatch):
    """The engine has ended a request whose end the server has not read yet."""
    reached, held, plain = threading.Event(), threading.Event(), server.engine._flush

    def flush():
        sent = bool(server.engine._outbox)
        plain()
        if sent and not held.is_set():
            reached.set()
            assert held.wait(60)

    monkeypatch.setattr(server.engine, "_flush", flush)
    said = []
    short = {**LONG, "max_tokens": 3}
    asking = threading.Thread(target=lambda: said.append(call(server, "/v1/completions", short)))
    asking.start()
    assert reached.wait(60)
    assert server.loop.open_streams == 1
    slept = []
    sleeping = threading.Thread(target=lambda: slept.append(call(server, "/sleep", {}, headers=KEY)[0]))
    sleeping.start()
    server.wait(lambda: server.loop._inbox)
    held.set()
    sleeping.join(60)
    asking.join(60)
    assert slept == [503]
    assert [status for status, _, _ in said] == [200]
    assert call(server, "/sleep", {}, headers=KEY)[0] == 200
    assert call(server, "/wake_up", {}, headers=KEY)[0] == 200


def test_what_sleeps_is_not_busy(folder):
    engine = engine_apart(partial(apart.slow, loading(folder)))
    engine.add(EngineRequest("a", [1, 2, 3], Sampling(max_tokens=200, ignore_eos=True)))
    while engine.report() is None:
        engine.wait()
    engine.finish("a", 0)  # as a stop string does, and right behind it
    engine.release()
    assert engine.age == 0
    engine.abort("a")
    engine.rouse()
    engine.wait()
    while engine.age:  # until the engine has said that this is done
        engine.wait()
    engine.rebuild()
    assert engine.age == 0
    engine.close()


def test_the_cache_is_emptied_and_counted(server):
    prompt = {"prompt": "a prompt that is longer than two blocks of the cache", "max_tokens": 1}

    def cached():
        usage = json.loads(call(server, "/v1/completions", prompt)[2])["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached() > 0 for _ in range(2)] == [False, True]
    assert json.loads(call(server, "/reset_prefix_cache", {}, headers=KEY)[2])["freed_blocks"] > 0
    assert cached() == 0


def test_a_client_that_leaves_frees_its_blocks(slow):
    for stream in (False, True):
        before = slow.loop.stats.generated_tokens
        s = opened(slow, {**LONG, "stream": stream, "n": 4})
        slow.wait(lambda: slow.loop.stats.blocks_used > 0)
        assert call(slow, "/sleep", {}, headers=KEY)[0] == 503
        s.close()
        slow.assert_idle()
        assert slow.loop.stats.generated_tokens - before < 4 * LONG["max_tokens"]


def test_a_request_that_cannot_be_taken_fails_alone(slow):
    body = {"max_tokens": 4, "n": 2}
    status, _, text = call(slow, "/v1/completions", {**body, "prompt": [9]})
    assert status == 500, text
    assert call(slow, "/v1/completions", {**body, "prompt": [8]})[0] == 200
    slow.assert_idle()


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "killed"])
def test_an_engine_that_ends_fails_everybody_clearly(folder, how):
    with running(folder, apart=apart.broken if how == "fails" else apart.slow) as server:
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(call(server, "/v1/completions", LONG))) for _ in range(3)
        ]
        for t in threads:
            t.start()
        if how == "killed":
            server.wait(lambda: server.loop.stats.running == 3)
            server.engine.process.kill()
        for t in threads:
            t.join(60)
        assert [status for status, _, _ in results] == [500] * 3
        assert all("engine failed" in error(text)["message"] for _, _, text in results)
        server.thread.join(60)  # the server ends by itself
        assert not server.thread.is_alive()
        assert isinstance(server.loop.failure, EngineLost)
        assert ("SIGKILL" if how == "killed" else "RuntimeError: the kernel is gone") in str(server.loop.failure)


def test_a_step_that_hangs_is_ill_health(slow):
    assert call(slow, "/health")[0] == 200
    s = opened(slow, LONG)
    slow.wait(lambda: slow.loop.stats.running == 1)
    slow.engine.process.send_signal(signal.SIGSTOP)
    slow.wait(lambda: call(slow, "/health")[0] == 503)
    slow.engine.process.send_signal(signal.SIGCONT)
    slow.wait(lambda: call(slow, "/health")[0] == 200)
    s.close()
    slow.assert_idle()


@pytest.mark.parametrize(
    ("build", "said"),
    [(partial(apart.exits, 3), "ended with exit code 3 while it loaded"), (apart.killed, "ended by SIGKILL while it"),
     (apart.unforeseen, "ended with exit code 1 while it loaded")],
)  # fmt: skip
def test_an_engine_that_ends_while_it_loads_is_a_message(build, said):
    with pytest.raises(UserError, match=said):
        RemoteEngine(build).wait_ready()


def test_what_it_refuses_is_the_users_mistake(folder, tmp_path, monkeypatch, capfd):
    for options, said in (
        ([str(tmp_path)], "no config.json"),
        ([str(folder), "--kv-cache", "10"], "the key/value pool has room for 0 blocks"),
        ([str(folder), "--with", "splitwise"], "whoever knows the fleet's secret, and there is none"),
    ):
        monkeypatch.setattr(sys, "argv", ["ridgeline", "serve", "--engine-process", "--port", "0", *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        errors = capfd.readouterr().err  # of the engine's process, too
        assert stop.value.code == 2
        assert said in errors
        assert "exit code" not in errors
        assert "Traceback" not in errors


def test_modules_of_the_current_folder_do_not_hide_others(folder, tmp_path, monkeypatch):
    for name in ("csv", "queue", "fastapi"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    engine = RemoteEngine(loading(folder)).wait_ready()
    assert engine.max_model_len > 0
    engine.close()


def test_what_is_kept_is_written_however_long_that_takes(folder, tmp_path):
    closed = tmp_path / "closed"
    engine = engine_apart(partial(apart.long_to_close, loading(folder), closed, tmp_path))
    assert engine.close(60.0)
    assert closed.exists()


def failed(folder, closed, go):
    engine = engine_apart(partial(apart.failing, loading(folder), closed, go))
    engine.add(EngineRequest("a", [1, 2, 3], Sampling(max_tokens=3)))
    engine._flush()
    assert select.select([engine._socket], [], [], 60)[0]  # it has said so
    return engine


def appears(file):
    """Wait until another process has made a file."""
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_that_a_call_learns_of_is_everybodys(folder, tmp_path):
    """Before the engine's process has ended."""
    engine = failed(folder, tmp_path / "closed", tmp_path / "go")
    with pytest.raises(EngineLost, match="the kernel is gone"):
        engine.reset_prefix_cache()
    for ask in (engine.wait, engine.reset_prefix_cache):
        with pytest.raises(EngineLost, match="the kernel is gone"):
            ask()
    assert not (tmp_path / "closed").exists()
    (tmp_path / "go").touch()
    assert not engine.close()


def test_what_a_failed_engine_keeps_is_written(folder, tmp_path, caplog):
    """Its failure and the end of its last step may come in one piece."""
    engine = failed(folder, tmp_path / "closed", tmp_path)
    appears(tmp_path / "closing")
    with pytest.raises(EngineLost, match="the kernel is gone"):
        engine.wait()
    assert not engine.close(0.2)
    assert (tmp_path / "closed").exists()
    assert "hangs" not in caplog.text


def test_an_engine_that_hangs_does_not_end_well(folder, tmp_path, caplog):
    began = tmp_path / "began"
    engine = engine_apart(partial(apart.hanging, loading(folder), began))
    engine.add(EngineRequest("a", [1, 2, 3], Sampling(max_tokens=3)))
    engine.rouse()
    engine.wait()
    appears(began)
    assert not engine.close(60.0)
    assert "exit code 1" in caplog.text


def children(server):
    return psutil.Process(server.process.pid).children(recursive=True)


def test_it_does_not_outlive_its_server(folder):
    with process(folder, "--engine-process", "--kv-cache", "1MB") as server:
        own = children(server)
        assert len(own) == 1
        stream = opened(server, {**LONG, "stream": True, "n": 16})
        assert stream.recv(100)
        server.process.kill()
        _, left = psutil.wait_procs(own, timeout=60)
        assert not left


def test_a_signal_to_both_lets_requests_finish(folder):
    """As a terminal and a service manager send it to all processes of a service."""
    with process(folder, "--engine-process", "--kv-cache", "1MB", "--drain-timeout", "120") as server:
        stream = opened(server, {**LONG, "stream": True, "n": 8})
        assert stream.recv(100)
        own = children(server)
        for one in (*own, server.process):
            one.send_signal(signal.SIGINT)
        rest = b""
        while piece := stream.recv(65536):
            rest += piece
        assert rest.count(b'"finish_reason":"length"') == 8
        assert b"data: [DONE]" in rest
        assert server.process.wait(60) == 0
        _, left = psutil.wait_procs(own, timeout=60)
        assert not left


def test_an_idle_server_whose_engine_is_killed_ends(folder):
    with process(folder, "--engine-process", "--kv-cache", "1MB") as server:
        children(server)[0].kill()
        assert server.process.wait(60) == 1


def test_the_ranks_of_a_divided_model_are_its_own(folder, servers):
    body = {"prompt": "The cat", "max_tokens": 9, "temperature": 0}
    with process(folder, "--engine-process", "--kv-cache", "1MB", "--with", "tensor_parallel:degree=2") as server:
        own = children(server)
        assert len(own) == 2
        said = [json.loads(call(s, "/v1/completions", body)[2])["choices"] for s in (servers[0], server)]
        assert said[0] == said[1]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        _, left = psutil.wait_procs(own, timeout=60)
        assert not left
