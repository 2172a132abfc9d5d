"""A fleet whose router and servers check each other's certificates."""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.certificates import certificates
from tests.serve.running import running, tiny
from typer.testing import CliRunner

aiohttp = pytest.importorskip("aiohttp")

from ridgeline.cli import app  # noqa: E402
from ridgeline.fleet.members import Members  # noqa: E402
from ridgeline.fleet.policies import LeastLoaded  # noqa: E402
from ridgeline.fleet.processes import Fleet, load_fleet  # noqa: E402
from ridgeline.fleet.router import Router  # noqa: E402
from ridgeline.serve.transfer.tls import Tls  # noqa: E402
from ridgeline.spec.errors import UserError  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls") / "ours", "ours", "DNS:localhost")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls") / "theirs", "theirs")


def fleet_file(folder, tls, server="checkpoint = '.'\n", **more):
    """A fleet file with these certificates."""
    given = {"port": 0, "tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca, **more}
    lines = [f"{k} = {json.dumps(v, default=str)}" for k, v in given.items() if v is not None]
    path = folder / "fleet.toml"
    path.write_text("[fleet]\n" + "\n".join(lines) + f"\n[[servers]]\n{server}")
    return path


def fleet_command(at, *words, ca=None):
    """`ridgeline fleet` with the address of a router."""
    return CliRunner().invoke(app, ["fleet", *words, "--at", at, *(["--tls-ca", str(ca)] if ca else [])])


def get(address, tls, body=None):
    """An answer's text."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60, context=tls.connecting(named=False)) as answer:
        return answer.read().decode()


@contextmanager
def routing(router, tls):
    """The address of a router in a thread of its own."""
    loop = asyncio.new_event_loop()
    runner = aiohttp.web.AppRunner(router.app())

    async def start():
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.listening(mutual=False)).start()
        while any(m.state != "up" for m in router.members.all):
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        yield f"https://localhost:{runner.addresses[0][1]}"  # which the certificate is for
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def check(url, server, ours, theirs, tmp_path):
    """Who shows no certificate gets nothing of a server; `status`, `drain` and `down` need the authority."""
    anyone, asked = Tls(ca=ours.ca), {"prompt": "x" * 90, "max_tokens": 4}
    asked["model"] = json.loads(get(f"{url}/v1/models", anyone))["data"][0]["id"]
    assert json.loads(get(f"{url}/v1/completions", anyone, asked))["usage"]["completion_tokens"] == 4
    assert f'ridgeline_router_member_up{{member="{server}"}} 1' in get(f"{url}/metrics", anyone)
    for stranger in (anyone, replace(theirs, ca=ours.ca)):
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            get(f"{server}/health", stranger)
    get(f"{server}/health", ours)
    assert f"{server}  up" in fleet_command(url, "status", ca=ours.ca).output
    assert "is draining" in fleet_command(url, "drain", server, ca=ours.ca).output
    assert f"{server}  draining" in fleet_command(url, "status", ca=ours.ca).output
    for at, ca, says in (
        (url, theirs.ca, "not accepted: "), (url, None, "not accepted: "), (url, tmp_path / "none", "cannot be read"),
        (url.replace("https", "http"), None, "no fleet at"), (url.replace("https", "http"), ours.ca, "shows none"),
        (url.replace("localhost", "127.0.0.1"), ours.ca, "not valid for '127.0.0.1'"),
    ):  # fmt: skip
        refused = fleet_command(at, "down", ca=ca)
        assert isinstance(refused.exception, UserError), refused.output
        assert says in str(refused.exception)
    assert "1 servers end" in fleet_command(url, "down", ca=ours.ca).output


def test_a_router_and_a_server_check_each_other(tmp_path, ours, theirs):
    with running(tiny(tmp_path / "model"), tls=replace(ours, clients=True)) as server:
        router, down = Router(Members([server.url]), LeastLoaded()), threading.Event()
        router.members.all[0].tls = ours.connecting(named=False)
        router.down, router.restart, router.started = down.set, lambda: asyncio.sleep(0), [server.url]
        with routing(router, ours) as url:
            check(url, server.url, ours, theirs, tmp_path)
        assert down.is_set()


@pytest.mark.nightly
def test_a_fleet_of_processes_over_https(tmp_path, ours, theirs):
    model = tiny(tmp_path / "model")
    file = fleet_file(tmp_path, ours, f"checkpoint = '{model}'\nrole = 'mixed'\noptions = ['--kv-cache', '2MB']\n")
    fleet = subprocess.Popen([sys.executable, "-m", "ridgeline", "fleet", "up", str(file)], stderr=subprocess.PIPE,
                             text=True)  # fmt: skip
    try:
        said, server, url = [], "", ""
        while not (url and server):
            said.append(fleet.stderr.readline())
            assert said[-1], said
            url = said[-1].split()[-1] if "routing on" in said[-1] else url
            server = said[-1].split()[0] if " is up: " in said[-1] else server
        threading.Thread(target=lambda: said.extend(fleet.stderr), daemon=True).start()
        assert url.startswith("https://127.0.0.1:")
        assert server.startswith("https://127.0.0.1:")
        check(url.replace("127.0.0.1", "localhost"), server, ours, theirs, tmp_path)
        assert fleet.wait(60) == 0
    finally:
        fleet.terminate()
        fleet.wait(60)


def test_machines_are_known_by_name_and_own_servers_by_the_authority(tmp_path, ours):
    file, tenants = load_fleet(fleet_file(tmp_path, ours, members=["https://far.example:8001"]))
    fleet = Fleet(file, tenants, print)
    own, far = fleet.router.members.all
    assert (own.tls.check_hostname, far.tls.check_hostname) == (False, True)
    assert {own.tls.verify_mode, far.tls.verify_mode} == {ssl.CERT_REQUIRED}
    assert fleet.router.started == [own.url]


@pytest.mark.parametrize(("made", "says"), [
    (lambda ours, theirs: replace(ours, key=None), "lacks tls_key"),
    (lambda ours, theirs: Tls(ca=ours.ca), "lacks tls_cert and tls_key"),
    (lambda ours, theirs: replace(ours, cert=ours.cert.parent / "none"), "none .*cannot be used: No such file"),
    (lambda ours, theirs: replace(ours, ca=ours.cert.parent / "none"), "none cannot be read: No such file"),
    (lambda ours, theirs: replace(ours, key=theirs.key), "theirs.key cannot be used"),
    (lambda ours, theirs: replace(ours, ca=theirs.ca), "is not accepted by the authority"),
])  # fmt: skip
def test_wrong_files_are_named(made, says, tmp_path, ours, theirs):
    """Before anything is started, with exit code 2."""
    file = fleet_file(tmp_path, made(ours, theirs))
    result = CliRunner().invoke(app, ["fleet", "up", str(file)])
    assert isinstance(result.exception, UserError), result.output
    with pytest.raises(UserError, match=says):
        raise result.exception


def test_options_of_servers_that_are_the_fleets_own(tmp_path, ours):
    with pytest.raises(UserError, match="--tls-cert is the fleet's own"):
        load_fleet(fleet_file(tmp_path, ours, "checkpoint = '.'\noptions = ['--tls-cert=x']\n"))
    for members, server, says in (
        (["far.example"], "", "not an address"), (["http://far.example"], "", "not encrypted"),
        (["https://far.example"], "role = 'prefill'\n", "cannot fetch caches"),
        (["https://"], "", "not an address"), (["https://h:99999"], "", "not an address"),
        (["https://h:0"], "", "not an address"), (["https://[::1"], "", "not an address"),
        (["HTTP://h"], "", "not encrypted"), (["https://h", "HTTPS://H:443/"], "", "listed twice"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            load_fleet(fleet_file(tmp_path, ours, f"checkpoint = '.'\n{server}", members=members))
    different = ["HTTPS://a:1", "https://a:2", "https://[::1]:1"]
    assert load_fleet(fleet_file(tmp_path, ours, members=different))[0].fleet.members == different
    for members, says in (
        (["far.example"], "not an address"), (["http://h:0"], "not an address"), (["ftp://h"], "not an address"),
        (["http://h", "HTTP://H:80/"], "listed twice"), (["http://h:1?"], "not an address"),
        (["http://h/#"], "not an address"), (["http://h:1/\x07"], "not an address"), ([" http://h"], "not an address"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["router", *members, "--port", "0"])
        assert isinstance(result.exception, UserError), result.output
        assert says in result.exception.what
    with pytest.raises(UserError, match="--tls-clients"):
        Tls.of(ours.cert, ours.key, None, clients=True)
