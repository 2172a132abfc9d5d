"""A server that gives its memory back, and takes it again."""

import json
import shutil
import weakref

import pytest
from tests.serve.running import lora, running, tiny
from tests.serve.test_reliability import call, error

from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
from ridgeline.serve.queue_limits import QueueLimits

BODY = {"prompt": "The cat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
KEY = {"Authorization": "Bearer admin"}


def text(server, **more):
    status, _, answer = call(server, "/v1/completions", {**BODY, **more})
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["text"]


def state(server):
    return json.loads(call(server, "/is_sleeping", None)[2])["is_sleeping"]


def test_weights_are_freed_and_come_back(tmp_path):
    folder = tiny(tmp_path / "tiny")
    adapter = lora(tmp_path / "adapters" / "own", load_checkpoint(folder))
    with running(folder, admin=["admin"], plan=["multi_adapter"]) as server:

        def build():
            return load_engine(folder, [*DEFAULT_PLAN, "multi_adapter"], kv_cache_bytes=2 << 20)

        assert call(server, "/sleep", {}, headers=KEY)[0] == 400  # it cannot be made again
        server.loop.rebuild = build
        named = {"lora_name": "own", "lora_path": str(adapter)}
        assert call(server, "/v1/load_lora_adapter", named, headers=KEY)[0] == 200
        before = text(server), text(server, model="own")
        assert before[0] != before[1]
        held = weakref.ref(server.engine.model), weakref.ref(server.engine.runner)
        server.engine = None
        assert call(server, "/sleep", {})[0] == 401  # without the key
        assert not state(server)
        assert json.loads(call(server, "/sleep?level=2", {}, headers=KEY)[2]) == {"status": "sleeping", "level": 2}
        assert state(server)
        assert [ref() for ref in held] == [None, None]
        assert "wake_up" in error(call(server, "/v1/completions", BODY)[2])["message"]
        assert call(server, "/ready", None)[0] == 503
        assert call(server, "/health", None)[0] == 200
        assert call(server, "/metrics", None)[0] == 200
        assert call(server, "/sleep", {}, headers=KEY)[0] == 200  # which changes nothing
        assert call(server, "/wake_up", {}, headers=KEY)[0] == 200
        assert not state(server)
        assert (text(server), text(server, model="own")) == before
        assert call(server, "/wake_up", {}, headers=KEY)[0] == 200
        assert call(server, "/sleep?level=3", {}, headers=KEY)[0] == 400


def test_whoever_asks_while_it_sleeps(tmp_path, monkeypatch):
    folder = tiny(tmp_path / "tiny")
    own, gone = (lora(tmp_path / "adapters" / name, load_checkpoint(folder)) for name in ("own", "gone"))
    with running(folder, admin=["admin"], plan=["multi_adapter"]) as server:
        server.loop.rebuild = lambda: load_engine(folder, [*DEFAULT_PLAN, "multi_adapter"], kv_cache_bytes=2 << 20)
        for path in (own, gone):
            named = {"lora_name": path.name, "lora_path": str(path)}
            assert call(server, "/v1/load_lora_adapter", named, headers=KEY)[0] == 200
        assert call(server, "/sleep", {}, headers=KEY)[0] == 200
        for route in ("load", "unload"):
            named = {"lora_name": "own", **({"lora_path": str(own)} if route == "load" else {})}
            assert call(server, f"/v1/{route}_lora_adapter", named, headers=KEY)[0] == 503
        with monkeypatch.context() as m:  # a request that was queued before the engine slept
            m.setattr(server.loop, "_admit", lambda jobs: None)
            assert "wake_up" in error(call(server, "/v1/completions", BODY)[2])["message"]
        shutil.rmtree(gone)
        assert call(server, "/wake_up?tags=weights", {}, headers=KEY)[0] == 400
        assert call(server, "/wake_up", {}, headers=KEY)[0] == 200
        assert [m["id"] for m in json.loads(call(server, "/v1/models")[2])["data"]] == ["tiny", "own"]
        assert text(server, model="own") != text(server)


def test_a_checkpoint_that_has_gone_is_the_servers_fault(tmp_path):
    folder = tiny(tmp_path / "tiny")
    with running(folder, admin=["admin"]) as server:
        server.loop.rebuild = lambda: load_engine(folder, DEFAULT_PLAN, kv_cache_bytes=2 << 20)
        before, weights = text(server), folder / "model.safetensors"
        server.engine.outputs.groups["another"] = None
        assert "1 requests are being served" in error(call(server, "/sleep", {}, headers=KEY)[2])["message"]
        assert call(server, "/sleep", {}, headers=KEY)[0] == 503
        del server.engine.outputs.groups["another"]
        server.engine = None
        assert call(server, "/sleep", {}, headers=KEY)[0] == 200
        weights.rename(tmp_path / "away")
        status, _, answer = call(server, "/wake_up", {}, headers=KEY)
        assert (status, "cannot wake" in error(answer)["message"]) == (503, True)
        assert state(server)
        (tmp_path / "away").rename(weights)
        assert call(server, "/wake_up", {}, headers=KEY)[0] == 200
        assert text(server) == before


@pytest.mark.parametrize("limit", [None, 10.0])
def test_what_would_come_too_late_is_refused_at_once(tmp_path, limit):
    with running(tiny(tmp_path / "tiny"), limits=QueueLimits(ttft=limit)) as server:
        for _ in range(5):
            server.loop.speed.observe(1, 1.0)  # a token per second
        long = {**BODY, "prompt": "a" * 99}
        assert call(server, "/v1/completions", long)[0] == 200  # nobody waits
        server.loop._queue.waiting["another"] = (1, 1)
        short, late = (call(server, "/v1/completions", body) for body in ({**BODY, "prompt": [5]}, long))
        assert short[0] == 200
        assert late[0] == (200 if limit is None else 503)
        if limit is not None:
            assert "a first token is expected in" in error(late[2])["message"]
            assert int(late[1]["retry-after"]) >= 1
        del server.loop._queue.waiting["another"]
        assert call(server, "/v1/completions", long)[0] == 200


def test_only_steps_that_leave_requests_waiting_tell_the_speed(tmp_path):
    with running(tiny(tmp_path / "tiny"), max_num_seqs=1) as server:
        assert call(server, "/v1/completions", BODY)[0] == 200
        assert server.loop.speed.seconds(100) == 0
        assert call(server, "/v1/completions", {**BODY, "prompt": ["a", "b", "c"]})[0] == 200
        assert server.loop.speed.seconds(100) > 0
        assert server.loop.speed.blocked == 0
