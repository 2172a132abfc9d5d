"""The router, before servers that answer, are full, break off and come back."""

import asyncio
import json

import pytest
import uvicorn

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from tests.fleet.stubs import Stub, ask, event, fleet, run, words  # noqa: E402

from ridgeline.fleet import router as router_module  # noqa: E402
from ridgeline.fleet.members import Member  # noqa: E402
from ridgeline.fleet.policies import PIECE, LeastLoaded, PrefixAware, Random  # noqa: E402
from ridgeline.fleet.router import Limits, has_token  # noqa: E402

pytestmark = pytest.mark.usefixtures("often")


def test_a_stream_passes_through():
    async def test():
        async with fleet([Stub("a")]) as (_, session, url):
            status, events = await ask(session, url, stream=True)
            assert (status, words(events)) == (200, "a0 a1 a2 ")
            assert (await ask(session, url))[1] == {"server": "a"}

    run(test)


@pytest.mark.parametrize("mode", ["before", "full"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_has_no_token_yet_is_asked_of_another(mode, stream):
    async def test():
        a, b = Stub("a"), Stub("b")
        async with fleet([a, b]) as (routing, session, url):
            a.mode = mode
            for _ in range(4):
                status, answer = await ask(session, url, stream=stream)
                assert status == 200
                served = words(answer)[0] if stream else answer["server"]
                assert served == ("b" if stream or mode == "full" else served)
            assert routing.retries >= (1 if stream or mode == "full" else 0)
            assert routing.broken == 0

    run(test)


def test_what_was_begun_ends_with_an_error():
    async def test():
        a = Stub("a")
        async with fleet([a]) as (routing, session, url):
            a.mode = "after"
            status, events = await ask(session, url, stream=True)
            assert status == 200
            assert words(events) == "a0 "
            assert a.url in events[-1]["error"]["message"]
            assert (routing.broken, routing.retries) == (1, 0)

    run(test)


def test_requests_wait_for_a_server_that_comes_back():
    async def test():
        a = Stub("a")
        async with fleet([a]) as (routing, session, url):
            await a.stop()
            late = asyncio.create_task(ask(session, url, stream=True))
            while routing.members.all[0].state != "down":
                await asyncio.sleep(0.01)
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 503
            await a.start(a.port)
            assert words((await late)[1]) == "a0 a1 a2 "

    run(test)


def test_nobody_there():
    async def test():
        a = Stub("a")
        async with fleet([a], limits=Limits(wait_s=0.1)) as (_, session, url):
            await a.stop()
            status, answer = await ask(session, url)
            assert status == 503
            assert "no server" in answer["error"]["message"]
            await a.start(a.port)

    run(test)


def test_all_full_is_said_as_the_server_says_it():
    async def test():
        a, b = Stub("a"), Stub("b")
        async with fleet([a, b]) as (_, session, url):
            a.mode = b.mode = "full"
            assert (await ask(session, url))[0] == 429
            assert len(a.asked) == len(b.asked) == 1

    run(test)


def test_draining_finishes_what_runs_and_takes_no_more():
    async def test():
        a, b = Stub("a"), Stub("b")
        async with fleet([a, b]) as (routing, session, url):
            a.gate.clear()
            running = asyncio.create_task(ask(session, url, stream=True))
            while not a.asked:
                await asyncio.sleep(0.01)
            async with session.post(f"{url}/fleet/drain", json={"url": a.url}) as answer:
                assert (await answer.json())["running"] == 1
            for _ in range(3):
                assert (await ask(session, url))[1] == {"server": "b"}
            a.gate.set()
            assert words((await running)[1]) == "a0 a1 a2 "
            async with session.get(f"{url}/fleet") as answer:
                found = {m["url"]: m for m in (await answer.json())["members"]}
            assert (found[a.url]["state"], found[a.url]["running"]) == ("draining", 0)
            async with session.post(f"{url}/fleet/resume", json={"url": a.url}) as answer:
                assert answer.status == 200
            while routing.members.find(a.url).state != "up":
                await asyncio.sleep(0.01)
            async with session.post(f"{url}/fleet/drain", json={"url": "http://else"}) as answer:
                assert answer.status == 404

    run(test)


def test_adapters_go_to_who_has_them():
    async def test():
        a, b = Stub("a"), Stub("b", ("m", "lora"))
        async with fleet([a, b]) as (_, session, url):
            for _ in range(3):
                assert (await ask(session, url, model="lora"))[1] == {"server": "b"}
            async with session.get(f"{url}/v1/models") as answer:
                assert [m["id"] for m in (await answer.json())["data"]] == ["lora", "m"]

    run(test)


def test_a_connection_to_a_server_is_left_before_the_server_closes_it():
    """Or a request that is sent as it closes would count as an answer that a lost server owes."""

    async def test():
        async with fleet([Stub("a")]) as (routing, _, _):
            assert routing.session.connector._keepalive_timeout < uvicorn.Config(app=None).timeout_keep_alive

    run(test)


def test_a_model_waits_for_the_server_that_has_it():
    async def test():
        a, b = Stub("a", ("x",)), Stub("b", ("y",))
        async with fleet([a, b]) as (routing, session, url):
            routing.members.all[0].become("draining")
            late = asyncio.create_task(ask(session, url, model="x"))
            await asyncio.sleep(0.2)
            assert not late.done()
            routing.members.all[0].become("up")
            assert (await late)[1] == {"server": "a"}
            assert (await ask(session, url, model="nobody's"))[0] == 200  # who is asked decides

    run(test)


def test_who_hangs_loses_its_requests_to_another():
    async def test():
        a, b = Stub("a"), Stub("b")
        async with fleet([a, b]) as (routing, session, url):
            a.gate.clear()
            hung = asyncio.create_task(ask(session, url, stream=True))
            while not a.asked:
                await asyncio.sleep(0.01)
            routing.members.lose(routing.members.find(a.url), "no answer to health checks")
            assert words((await hung)[1]) == "b0 b1 b2 "
            a.gate.set()

    run(test)


@pytest.mark.parametrize("body", [b"[" * 200_000, json.dumps({"model": "m", "prompt": "\ud800" * 300}).encode(), b"{"])
def test_no_body_breaks_the_router(body):
    async def test():
        async with (
            fleet([Stub("a")], PrefixAware()) as (_, session, url),
            session.post(f"{url}/v1/nothing", data=body) as answer,
        ):
            assert answer.status == 404

    run(test)


def test_a_body_that_is_too_large_is_refused_as_servers_refuse(monkeypatch):
    monkeypatch.setattr(router_module, "LARGEST", 1000)

    async def test():
        async with fleet([Stub("a")]) as (_, session, url):
            status, answer = await ask(session, url, text="x" * 1000)
            assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
            assert (await ask(session, url))[0] == 200

    run(test)


def test_packed_answers_are_readable():
    async def test():
        async with fleet([Stub("a")]) as (_, session, url), session.post(f"{url}/v1/packed", json={}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert (await answer.json())["text"] == "x" * 999

    run(test)


def test_metrics_of_every_member():
    async def test():
        a, b = Stub("a"), Stub("b")
        async with fleet([a, b]) as (_, session, url):
            await ask(session, url)
            async with session.get(f"{url}/metrics") as answer:
                text = await answer.text()
            assert f'seen{{member="{a.url}",a="b"}} 1' in text
            assert f'seen{{member="{b.url}",a="b"}} 0' in text
            assert text.count("# TYPE seen counter") == 1
            assert f'ridgeline_router_member_sent{{member="{a.url}"}} 1' in text

    run(test)


def test_prefixes_stay_together_and_loads_even():
    able = [Member(f"http://{i}") for i in range(4)]
    policy, hits, total = PrefixAware(), 0, 0
    seen = {m: set() for m in able}
    draw = Random(1).draw
    for _ in range(400):
        group = draw.randrange(12)
        prompt = f"{group:04}" * PIECE + f"{draw.random()}" * 40
        chosen = policy.choose(able, prompt)
        hits, total = hits + (group in seen[chosen]), total + 1
        seen[chosen].add(group)
        chosen.sent += 1
    assert hits / total > 0.95  # at random one of four groups in a cache of its own would be missed much more often
    able[0].running = 50
    assert all(policy.choose(able, f"{g:04}" * PIECE) is not able[0] for g in range(12))


def test_least_loaded():
    a, b, c = (Member(f"http://{i}") for i in range(3))
    a.running, b.sent = 1, 5
    assert LeastLoaded().choose([a, b, c], "") is c


def test_roles_alone_are_no_tokens():
    assert not has_token(event({"delta": {"role": "assistant", "content": ""}}))
    assert not has_token(event({"delta": {"content": "x"}})[:-9])
    assert has_token(event({"delta": {"content": "x"}}))
    assert has_token(event({"delta": {"tool_calls": [{}]}}))
    assert has_token(event({"delta": {}, "finish_reason": "stop"}))
    assert has_token(b'data: {"error": {"message": "no"}}\n\n')
    assert not has_token(b'data: {"type": "response.created"}\n\n')
    assert has_token(b'data: {"type": "response.output_text.delta", "delta": "x"}\n\n')
    assert has_token(b'data: {"type": "response.failed"}\n\n')


def test_models_are_listed_as_the_servers_list_them():
    async def test():
        async with (
            fleet([Stub("a", ("m", "x")), Stub("b")]) as (_, session, url),
            session.get(f"{url}/v1/models") as answer,
        ):
            listed = (await answer.json())["data"]
            assert [m["id"] for m in listed] == ["m", "x"]
            assert all((m["object"], m["max_model_len"]) == ("model", 512) for m in listed)

    run(test)


def test_the_beginning_of_a_message_is_no_token():
    def holds(**chunk):
        return has_token(f"event: {chunk['type']}\ndata: {json.dumps(chunk)}\n\n".encode())

    assert not holds(type="message_start", message={"content": []})
    assert not holds(type="ping")
    assert not holds(type="content_block_start", content_block={"type": "text", "text": ""})
    assert holds(type="content_block_start", content_block={"type": "tool_use", "name": "f"})
    assert holds(type="content_block_delta", delta={"type": "text_delta", "text": "x"})
    assert holds(type="error", error={})


@pytest.mark.parametrize("named", [True, False])
def test_an_answer_that_breaks_off_ends_as_its_events_are_named(named):
    """Anthropic's client skips an event without a name: a message that was cut short would look complete."""

    class Server(Stub):
        async def chat(self, request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            name = b"event: content_block_delta\n" if named else b""
            await response.write(name + b'data: {"type": "content_block_delta"}\n\n')
            await asyncio.sleep(0.05)
            request.transport.abort()
            return response

    async def test():
        async with (
            fleet([Server("a")]) as (_, session, url),
            session.post(f"{url}/v1/chat/completions", json={"messages": []}) as answer,
        ):
            last = (await answer.text()).rstrip("\n").split("\n\n")[-1].splitlines()
            assert last[:-1] == (["event: error"] if named else [])
            assert json.loads(last[-1][6:])["type"] == "error"

    run(test)
