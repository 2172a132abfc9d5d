"""A server that gives its memory back, and takes it again."""

import json
import weakref

import pytest
from tests.serve.running import lora, running, tiny
from tests.serve.test_reliability import call, error

from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
from ridgeline.serve.engine_loop import QueueLimits

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


@pytest.mark.parametrize("limit", [None, 10.0])
def test_what_would_come_too_late_is_refused_at_once(tmp_path, limit):
    with running(tiny(tmp_path / "tiny"), limits=QueueLimits(ttft=limit)) as server:
        for _ in range(5):
            server.loop.speed.observe(1, 1.0)  # a token per second
        short, long = (
            call(server, "/v1/completions", BODY),
            call(server, "/v1/completions", {**BODY, "prompt": "a" * 99}),
        )
        assert short[0] == 200
        assert long[0] == (200 if limit is None else 503)
        if limit is not None:
            assert "a first token is expected in" in error(long[2])["message"]
            assert int(long[1]["retry-after"]) >= 1
