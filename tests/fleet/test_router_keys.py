"""Who may ask a router: clients' keys, tenants, and who manages it."""

import asyncio
import json

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from tests.fleet.stubs import Stub, ask, fleet, run  # noqa: E402

from ridgeline.fleet.tenants import Tenant, Tenants, load_tenants  # noqa: E402
from ridgeline.serve.http import OPEN  # noqa: E402
from ridgeline.spec.errors import UserError  # noqa: E402

pytestmark = pytest.mark.usefixtures("often")


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
