"""Encrypted connections: between machines, who check each other's certificates, and for clients."""

import asyncio
import shutil
import ssl
import urllib.error
import urllib.request

import pytest
import torch
from tests.certificates import certificates
from tests.serve.running import running, tiny
from tests.serve.transferring import pair, split
from tests.serving import alone, ask, model
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.serve.transfer.connection import Lost
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError
from ridgeline.swarm.link import Answer, Link, Links, Listener

SECRET = b"a secret of the tests"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls") / "theirs", "theirs")


@pytest.fixture(scope="module")
def made():
    return model()


# ---- between servers -------------------------------------------------------------------------------------------------


def test_caches_travel_encrypted(made, ours):
    """The same tokens, and no frame can be read on the way."""
    seen = []

    async def proxy(reader, writer, address):
        host, port = address.rsplit(":", 1)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def copy(source, sink):
            while data := await source.read(1 << 16):
                seen.append(data)
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

    requests = [ask("a", list(range(3, 80)), 6), ask("b", list(range(5, 60)), 6, temperature=0.9, seed=4)]
    tls = ours.listening(mutual=True), ours.connecting(named=False)
    with pair(made, tls=tls) as (prefill, decode, address):
        loop = decode.client.thread.loop
        start = asyncio.start_server(lambda r, w: proxy(r, w, address), "127.0.0.1", 0)
        between = asyncio.run_coroutine_threadsafe(start, loop).result(10)
        via = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
        assert split(prefill, decode, via, *requests) == {
            (r.id, i): tokens for r in requests for i, tokens in alone(made, r).items()
        }
        assert decode.count("prompts_total", result="complete") == 2
        assert not prefill.said + decode.said
    wire = b"".join(seen)
    assert len(wire) > 10_000
    assert b"nonce" not in wire, "a greeting in clear text"
    assert wire[0] == 22, "a TLS handshake"


@pytest.mark.parametrize("kind", ["another authority", "no certificate", "no TLS"])
def test_who_cannot_show_a_certificate_gets_nothing(kind, made, ours, theirs):
    """The decode server computes the prompt itself, with the secret or without."""
    other = {
        "another authority": Tls(theirs.cert, theirs.key, ours.ca).connecting(named=False),
        "no certificate": Tls(ca=ours.ca).connecting(named=False),
        "no TLS": None,
    }[kind]
    request = ask("a", list(range(3, 80)), 6)
    with pair(made, tls=(ours.listening(mutual=True), other)) as (prefill, decode, address):
        got = split(prefill, decode, address, request)
        assert got == {(request.id, i): tokens for i, tokens in alone(made, request).items()}
        assert prefill.count("sent_bytes_total") == 0
        assert decode.count("prompts_total", result="lost") == 1
        assert any("lost" in line for line in decode.said)


# ---- between peers of a swarm ----------------------------------------------------------------------------------------


def test_peers_of_a_swarm_check_each_other(ours, theirs):
    async def handle(owner, op, m, tensors):
        return Answer({"op": op}, {"twice": tensors["x"] * 2})

    async def asked(address, context):
        link = await Link.open(address, SECRET, "model", tls=context)
        await link.ask("double", {"from": "x"}, {"x": torch.ones(1)}, 5.0)

    async def run():
        listener = Listener(SECRET, "model", handle, lambda name: None, lambda line: None, ours)
        address = f"127.0.0.1:{await listener.listen('127.0.0.1', 0)}"
        friend = Links("me", SECRET, "model", tls=ours)
        answer = await friend.ask(address, "double", {}, {"x": torch.arange(4.0)})
        await friend.close()
        refused = []
        for tls in (theirs, Tls(theirs.cert, theirs.key, ours.ca), None):
            context = tls.connecting(named=False) if tls else None
            with pytest.raises(Lost) as error:
                await asked(address, context)
            refused.append(str(error.value))
        await listener.close()
        return answer, refused

    answer, refused = asyncio.run(asyncio.wait_for(run(), 60))
    assert torch.equal(answer.tensors["twice"], 2 * torch.arange(4.0))
    assert "certificate" in refused[0]


# ---- for clients -----------------------------------------------------------------------------------------------------


def test_clients_and_a_router_over_https(tmp_path, ours, theirs):
    aiohttp = pytest.importorskip("aiohttp")
    from ridgeline.fleet.members import Members
    from ridgeline.fleet.policies import LeastLoaded
    from ridgeline.fleet.router import Router

    def models(url, authority):
        context = ssl.create_default_context(cafile=authority)
        with urllib.request.urlopen(f"{url}/v1/models", context=context, timeout=20) as answer:
            return answer.status

    async def through_router(url):
        routing = Router(Members([url]), LeastLoaded())
        routing.members.all[0].tls = ours.connecting(named=True)
        runner = aiohttp.web.AppRunner(routing.app())
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ours.listening(mutual=False)).start()
        try:
            while any(m.state != "up" for m in routing.members.all):
                await asyncio.sleep(0.01)
            return await asyncio.to_thread(models, f"https://127.0.0.1:{runner.addresses[0][1]}", ours.ca)
        finally:
            await runner.cleanup()

    with running(tiny(tmp_path / "model"), tls=ours) as server:
        assert server.url.startswith("https://")
        assert models(server.url, ours.ca) == 200
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            models(server.url, theirs.ca)
        assert asyncio.run(asyncio.wait_for(through_router(server.url), 60)) == 200


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_wrong_files_are_named(tmp_path, ours, theirs):
    with pytest.raises(UserError, match="--tls-cert is given without --tls-key"):
        Tls.of(ours.cert, None, None)
    with pytest.raises(UserError, match="only a part") as error:
        Tls(ours.cert, ours.key).listening(mutual=True)
    assert "--tls-ca" in error.value.fix
    with pytest.raises(UserError, match=r"key .*theirs.key cannot be used"):
        Tls(ours.cert, theirs.key, ours.ca).listening(mutual=True)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Tls(ca=tmp_path / "none").connecting(named=True)
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(UserError, match="cannot be read"):
        Tls(ca=tmp_path / "text").connecting(named=True)
    assert Tls.of(None, None, None) is None


@pytest.mark.parametrize(("args", "fix"), [
    (["serve", "MODEL", "--tls-cert", "CERT", "--tls-key", "KEY", "--tls-ca", "CA"], "--api-key"),
    (["router", "http://127.0.0.1:1", "--tls-ca", "CA"], "https://"),
])  # fmt: skip
def test_an_authority_that_would_check_nobody_is_refused(args, fix, tmp_path, ours):
    files = {"CERT": ours.cert, "KEY": ours.key, "CA": ours.ca}
    if "MODEL" in args:
        files["MODEL"] = tiny(tmp_path / "model")
    result = CliRunner().invoke(app, [str(files.get(a, a)) for a in args])
    assert isinstance(result.exception, UserError), result.output
    assert "--tls-ca" in str(result.exception)
    assert fix in result.exception.fix


def test_a_server_of_a_role_needs_the_authority(tmp_path, ours):
    folder = tiny(tmp_path / "model")
    (tmp_path / "secret").write_bytes(SECRET)
    args = ["serve", folder, "--role", "prefill", "--fleet-secret-file", tmp_path / "secret",
            "--tls-cert", ours.cert, "--tls-key", ours.key]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    assert "--tls-ca" in result.exception.fix
