"""Pairs of servers for a request: the shortest queues, pools that help each other, and headers that only a router
writes."""

import pytest

pytest.importorskip("aiohttp")
from tests.fleet.stubs import Stub, fleet

from ridgeline.fleet.members import Member, Members
from ridgeline.fleet.pools import CHARACTERS, ITERATIONS, Pools
from ridgeline.serve.transfer.secret import HEADER, SHORTEST, read_secret, signed, verified
from ridgeline.spec.errors import UserError

SECRET = b"a secret of the tests"


def member(name, role, tokens=0, sequences=0, weights="w"):
    return Member(f"http://{name}", "up", role=role, source=f"{name}:1" if role else "", fingerprint=weights,
                  queued_tokens=tokens, most_tokens=100, sequences=sequences, most_sequences=10)  # fmt: skip


def test_the_shortest_queue_of_each_pool():
    p, q = member("p", "prefill", tokens=50), member("q", "prefill", tokens=20)
    d, e = member("d", "decode", sequences=3), member("e", "decode", sequences=2)
    pools = Pools()
    assert pools.choose([p, q, d, e], [p, q, d, e], "x" * 40 * CHARACTERS) == (e, q)
    assert pools.choose([p, q, d, e], [p, q, d, e], "x" * CHARACTERS) == (d, p)  # both were given something before
    assert pools.flips == 0


def test_a_full_prefill_pool_is_helped_and_the_helper_returns():
    lines = []
    pools = Pools(lines.append)
    p, d, e = member("p", "prefill"), member("d", "decode", sequences=5), member("e", "decode", sequences=1)
    m = member("m", "mixed", tokens=100)
    full = ITERATIONS * p.most_tokens
    p.queued_tokens = full - 1
    assert pools.choose([p, d, e, m], [p, d, e, m], "x") == (e, p)
    assert p.queued_tokens == full
    assert pools.choose([p, d, e, m], [p, d, e, m], "x")[1] is m  # first a mixed server
    m.queued_tokens = full
    assert pools.choose([p, d, e, m], [p, d, e, m], "x")[1] in (d, None)  # then one of the other pool
    assert (d.lent, e.lent).count(True) == 1
    assert pools.flips == 1
    for one in (p, d, e, m):
        one.queued_tokens = 0
    assert pools.choose([p, d, e, m], [p, d, e, m], "x")[1] is p
    assert not d.lent
    assert not e.lent
    assert [line.partition(" is ")[2][:5] for line in lines] == ["mixed", "for d"]


def test_a_full_decode_pool_is_helped():
    pools = Pools()
    p, q, d = member("p", "prefill", sequences=4), member("q", "prefill"), member("d", "decode", sequences=10)
    decode, prefill = pools.choose([p, q, d], [p, q, d], "x")
    assert decode is q
    assert q.lent
    assert prefill in (p, None)


def test_everything_full_goes_to_the_own_pool():
    p, d = member("p", "prefill", 10**6, 99), member("d", "decode", 10**6, 99)
    assert Pools().choose([p, d], [p, d], "x") == (d, p)


def test_only_servers_of_the_same_weights_are_joined():
    lines = []
    p, d = member("p", "prefill", weights="other"), member("d", "decode")
    pools = Pools(lines.append)
    assert pools.choose([p, d], [p, d], "x") == pools.choose([p, d], [p, d], "x") == (d, None)
    assert lines[0] == "http://d cannot use prompts of http://p: give both the same checkpoint, --dtype and --with"
    assert lines[1:] == ["http://d is mixed: no other can help"]
    plain = member("plain", "")
    assert Pools().choose([plain], [p, plain], "x") == (plain, None)


def test_one_server_left_does_both():
    p = member("p", "prefill")
    assert Pools().choose([p], [p], "x") == (p, None)
    d = member("d", "decode")
    assert Pools().choose([d], [d], "x") == (d, None)


@pytest.mark.parametrize("value", ["h:1", "h:1 00", "", " ", "h:1 é", signed(b"another secret of tests", "h:1"),
                                   signed(SECRET, "h:1").replace("h:1", "h:2")])  # fmt: skip
def test_addresses_are_signed(value):
    assert verified(SECRET, signed(SECRET, "h:1")) == "h:1"
    assert verified(SECRET, value) is None


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    file.write_text("s" * SHORTEST + "\n")
    assert read_secret(file, None) == b"s" * SHORTEST
    assert read_secret(None, None) == b""
    assert read_secret(None, "s" * SHORTEST) == b"s" * SHORTEST
    file.write_text("short")
    for wrong in (lambda: read_secret(file, None), lambda: read_secret(None, "short"),
                  lambda: read_secret(tmp_path / "none", None)):  # fmt: skip
        with pytest.raises(UserError):
            wrong()


class Divided(Stub):
    """A server with a role."""

    def __init__(self, name, role):
        super().__init__(name)
        self.description = {"role": role, "port": 7, "fingerprint": "w", "queued_tokens": 0, "most_tokens": 64,
                            "sequences": 0, "most_sequences": 8}  # fmt: skip
        self.headers = []

    async def chat(self, request):
        self.headers.append(request.headers.get(HEADER))
        return await super().chat(request)

    async def describe(self, _):
        from aiohttp import web

        return web.json_response(self.description)

    async def start(self, port=0):
        self.more = [("/fleet-member", self.describe)]
        return await super().start(port)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_the_router_names_the_prefill_server_and_nobody_else_does(secret):
    import asyncio

    async def go():
        p, d = Divided("p", "prefill"), Divided("d", "decode")
        async with fleet([p, d], secret=secret) as (_, session, url):
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            forged = {HEADER: signed(SECRET, "elsewhere:1")}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=forged) as answer:
                who = (await answer.json())["server"]
            async with session.get(f"{url}/fleet") as answer:
                roles = [m["role"] for m in (await answer.json())["members"]]
            assert roles == ["prefill", "decode"]
            if secret:
                assert who == "d"
                assert [verified(SECRET, h) for h in d.headers] == ["127.0.0.1:7"]
            else:
                assert p.headers + d.headers == [None]

    asyncio.run(go())


def test_a_description_that_is_none_is_no_answer():
    from ridgeline.fleet.members import _describe

    m = Members(["http://a:1"]).all[0]
    good = {"role": "mixed", "port": 7, "fingerprint": "w", "queued_tokens": 1, "most_tokens": 2, "sequences": 3,
            "most_sequences": 4}  # fmt: skip
    _describe(m, good)
    assert (m.role, m.source, m.queued_tokens, m.most_sequences) == ("mixed", "a:7", 1, 4)
    for wrong in ({**good, "role": "boss"}, {**good, "port": "x"}, {"role": "mixed"}, 5):
        with pytest.raises((ValueError, KeyError, TypeError)):
            _describe(m, wrong)


def test_roles_in_a_fleet_file(tmp_path, monkeypatch):
    from ridgeline.fleet.processes import Fleet, load_fleet

    file = tmp_path / "fleet.toml"
    server = f'[[servers]]\ncheckpoint = "{tmp_path}"\n'
    file.write_text(f'{server}role = "prefill"\n{server}role = "decode"\n{server}')
    table, tenants = load_fleet(file)
    assert [s.role for s in table.servers] == ["prefill", "decode", None]
    monkeypatch.setenv("RIDGELINE_FLEET_SECRET", SECRET.decode())
    assert Fleet(table, tenants, print).router.secret == SECRET
    monkeypatch.delenv("RIDGELINE_FLEET_SECRET")
    made = [Fleet(table, tenants, print).router.secret for _ in range(2)]
    assert len(set(made)) == 2
    assert min(map(len, made)) >= SHORTEST
    for wrong in ('role = "boss"\n', 'options = ["--role", "prefill"]\n', 'options = ["--fleet-secret-file=x"]\n'):
        file.write_text(server + wrong)
        with pytest.raises(UserError):
            load_fleet(file)


@pytest.mark.parametrize("more", [(), ("--fleet-secret-file", "nowhere")])
def test_a_server_with_a_role_needs_the_secret(tmp_path, monkeypatch, more):
    from typer.testing import CliRunner

    from ridgeline.cli import app

    monkeypatch.delenv("RIDGELINE_FLEET_SECRET", raising=False)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--role", "prefill", *more])
    assert isinstance(result.exception, UserError)
    assert "secret" in str(result.exception)
