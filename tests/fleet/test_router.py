"""The router, before servers that answer, are full, break off and come back."""

import asyncio
import contextlib
import json

import pytest
import uvicorn

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

from ridgeline.fleet import members as members_module  # noqa: E402
from ridgeline.fleet import router as router_module  # noqa: E402
from ridgeline.fleet.members import Member, Members  # noqa: E402
from ridgeline.fleet.policies import PIECE, LeastLoaded, PrefixAware, Random  # noqa: E402
from ridgeline.fleet.router import Limits, Router, has_token  # noqa: E402
from ridgeline.fleet.tenants import Tenant, Tenants, load_tenants  # noqa: E402
from ridgeline.serve.http import OPEN  # noqa: E402
from ridgeline.spec.errors import UserError  # noqa: E402


class Stub:
    """A server whose answers are told beforehand: ok, full, or broken before the first token, or after it."""

    def __init__(self, name, models=("m",)):
        self.name, self.models, self.mode, self.asked, self.keys = name, models, "ok", [], []
        self.more = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, port=0):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get(
            "/metrics", lambda _: web.Response(text=f'# TYPE seen counter\nseen{{a="b"}} {len(self.asked)}\n')
        )
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/packed", self.packed)
        for path, handler in self.more:
            app.router.add_get(path, handler)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        await self.runner.cleanup()

    async def packed(self, _):
        response = web.json_response({"text": "x" * 999})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def health(self, _):
        return web.Response()

    async def metrics(self, _):
        return web.Response(text=f'# TYPE seen counter\nseen{{a="b"}} {len(self.asked)}\n')

    async def list(self, _):
        return web.json_response({"data": [{"id": m, "max_model_len": 512} for m in self.models]})

    async def chat(self, request):
        body = await request.json()
        self.asked.append((body, request.headers.get("Authorization")))
        self.keys.append((request.headers.getall("Authorization", []), request.headers.getall("X-Api-Key", [])))
        if self.mode == "full":
            return web.json_response({"error": {"message": "full"}}, status=429)
        await self.gate.wait()
        if not body.get("stream"):
            return web.json_response({"server": self.name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"delta": {"role": "assistant", "content": ""}}))
        if self.mode == "before":
            request.transport.abort()
            return response
        for i in range(3):
            await response.write(event({"delta": {"content": f"{self.name}{i} "}}))
            if self.mode == "after":
                await asyncio.sleep(0.05)
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def event(choice):
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def fleet(stubs, policy=None, **more):
    """(router, session, address) before stubs that are up."""
    for stub in stubs:
        await stub.start()
    limits = more.pop("limits", Limits(wait_s=60))
    key = more.pop("member_key", "")
    routing = Router(Members([s.url for s in stubs], key=key), policy or LeastLoaded(), limits=limits, **more)
    runner = web.AppRunner(routing.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            while any(m.state != "up" for m in routing.members.all):
                await asyncio.sleep(0.01)
            yield routing, session, url
    finally:
        await runner.cleanup()
        for stub in stubs:
            await stub.stop()


async def ask(session, url, text="hi", **more):
    """(status, text of the answer or body)."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": f"Bearer {body.pop('key')}"} if "key" in body else {}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        raw = await answer.text()
        if answer.content_type != "text/event-stream":
            return answer.status, json.loads(raw)
        lines = [x[6:] for x in raw.splitlines() if x.startswith("data: ") and x != "data: [DONE]"]
        return answer.status, [json.loads(x) for x in lines]


def words(events):
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if "choices" in e)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(members_module, "EVERY", 0.05)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 120))


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


def test_tenants_and_keys():
    async def test():
        a, now = Stub("a"), [100.0]
        tenants = Tenants([Tenant("x", "kx", requests_per_minute=2), Tenant("y", "ky", concurrency=1)], lambda: now[0])
        async with fleet([a], tenants=tenants, member_key="inner") as (_, session, url):
            assert (await ask(session, url))[0] == 401
            assert (await ask(session, url, key="wrong"))[0] == 401
            assert [(await ask(session, url, key="kx"))[0] for _ in range(3)] == [200, 200, 429]
            now[0] += 30  # half a minute fills one
            assert [(await ask(session, url, key="kx"))[0] for _ in range(2)] == [200, 429]
            a.gate.clear()
            first = asyncio.create_task(ask(session, url, key="ky"))
            while tenants.all[1].running != 1:
                await asyncio.sleep(0.01)
            assert (await ask(session, url, key="ky"))[0] == 429
            a.gate.set()
            assert (await first)[0] == 200
            assert (await ask(session, url, key="ky"))[0] == 200
            assert {key for _, key in a.asked} == {"Bearer inner"}

    run(test)


@pytest.mark.parametrize(("headers", "status"), [
    ({"x-api-key": "kx"}, 200), ({"authorization": "bearer kx"}, 200), ({"authorization": "Bearer  kx "}, 200),
    ({"authorization": "kx"}, 401), ({"authorization": "Basic kx"}, 401), ({"x-api-key": "ky"}, 401)])  # fmt: skip
@pytest.mark.parametrize("tenants", [True, False])
def test_keys_come_as_servers_take_them_and_only_the_members_own_goes_on(headers, status, tenants):
    """As clients of OpenAI's API and of Anthropic's send them, which read an error each in its own way."""

    async def test():
        a = Stub("a")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        more = {"tenants": Tenants([Tenant("x", "kx")]), "member_key": "in"} if tenants else {"member_key": "kx"}
        async with (
            fleet([a], **more) as (_, session, url),
            session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == status
            if status == 401:
                told = await answer.json()
                assert told["type"] == "error"
                assert (told["error"]["type"], told["error"]["code"]) == ("authentication_error", "invalid_api_key")
        assert a.keys == ([([f"Bearer {more['member_key']}"], [])] if status == 200 else [])

    run(test)


def test_a_router_without_keys_passes_on_those_of_clients():
    async def test():
        a = Stub("a")
        async with fleet([a]) as (_, session, url):
            assert (await ask(session, url, key="theirs"))[0] == 200
        assert a.keys == [(["Bearer theirs"], [])]

    run(test)


def test_paths_that_ask_for_no_key_are_those_of_servers():
    async def test():
        a = Stub("a")
        a.more.append(("/version", lambda _: web.json_response({"version": "1"})))
        async with fleet([a], member_key="inner") as (_, session, url):
            for path, status in (*((path, 200) for path in OPEN), ("/health/", 200), ("/v1/models/", 401), ("/x", 401)):
                async with session.get(url + path) as answer:
                    assert (path, answer.status) == (path, status)
            for path in ("/ping", "/ping/"):
                async with session.post(url + path) as answer:
                    assert (answer.status, await answer.json()) == (200, {"status": "ok"})
            async with session.get(f"{url}/v1/models/", headers={"x-api-key": "inner"}) as answer:
                assert [m["owned_by"] for m in (await answer.json())["data"]] == [""]

    run(test)


def test_a_connection_to_a_server_is_left_before_the_server_closes_it():
    """Or a request that is sent as it closes would count as an answer that a lost server owes."""

    async def test():
        async with fleet([Stub("a")]) as (routing, _, _):
            assert routing.session.connector._keepalive_timeout < uvicorn.Config(app=None).timeout_keep_alive

    run(test)


def test_draining_needs_the_admin_key():
    async def test():
        a = Stub("a")
        async with fleet([a], admin_key="boss") as (routing, session, url):
            for key, status in (("", 403), ("Bearer boss", 200)):
                headers = {"Authorization": key}
                async with session.post(f"{url}/fleet/drain", json={"url": a.url}, headers=headers) as answer:
                    assert answer.status == status
            assert routing.members.all[0].state == "draining"

    run(test)


def test_without_tenants_the_members_key_is_the_clients():
    async def test():
        a = Stub("a")
        async with fleet([a], member_key="inner") as (_, session, url):
            assert (await ask(session, url))[0] == 401
            assert (await ask(session, url, key="inner"))[0] == 200

    run(test)


def test_a_page_in_a_browser_manages_nothing():
    async def test():
        a = Stub("a")
        async with fleet([a]) as (routing, session, url):
            for more in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"X-Forwarded-For": "9.9.9.9"},
                         {"Content-Type": "text/plain"}):  # fmt: skip
                headers = {"Content-Type": "application/json", **more}
                body = json.dumps({"url": a.url})
                async with session.post(f"{url}/fleet/drain", data=body, headers=headers) as answer:
                    assert answer.status == 403, more
            assert routing.members.all[0].state == "up"

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


BAD = ("x = ", "[tenants.a]\nkey = ''\n", "[tenants.a]\nkey = 3\n", "[tenants.a]\nkey = 'k'\nrate = 1\n",
       "[tenants.a]\nkey = 'k'\nrequests_per_minute = 0.0\n",
       "[tenants.a]\nkey = 'k'\n[tenants.b]\nkey = 'k'\n", "tenants = 3")  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_files_of_tenants(tmp_path, text):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_tenants(path)
    with pytest.raises(UserError):
        load_tenants(tmp_path / "none.toml")
