"""`ridgeline router`: one endpoint before several servers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import app, require_package, say
from ridgeline.cli.engine_options import SecretFile, TlsCa, TlsCert, TlsKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from ssl import SSLContext

    from ridgeline.fleet.router import Router


DRAIN = 120.0
"""Seconds that running requests get to end when the router does."""


@app.command()
def router(
    servers: Annotated[list[str], typer.Argument(metavar="URL...", help="Addresses of the servers.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")] = 8080,
    policy: Annotated[str, typer.Option(help="Routing policy: prefix, least-loaded or random.")] = "prefix",
    tenants: Annotated[Path | None, typer.Option(help="TOML file of tenants: keys and limits.")] = None,
    member_key: Annotated[
        str, typer.Option(envvar="RIDGELINE_API_KEY", help="API key of the servers (and of clients, without tenants).")
    ] = "",
    admin_key: Annotated[
        str, typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="API key for draining and resuming members.")
    ] = "",
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that a request waits for a server to come up.")] = 30.0,
) -> None:
    """Route OpenAI requests to servers by their load, their cached prefixes and their adapters. Ctrl-C or SIGTERM
    stops it, when running requests have ended."""
    require_package("aiohttp", "fleet")
    import asyncio
    import contextlib
    import os
    import signal

    from ridgeline.fleet.members import Members
    from ridgeline.fleet.policies import POLICIES
    from ridgeline.fleet.router import Limits, Router
    from ridgeline.fleet.tenants import Tenants, load_tenants
    from ridgeline.serve.address import server_addresses
    from ridgeline.serve.transfer.secret import VARIABLE, read_secret
    from ridgeline.serve.transfer.tls import Tls
    from ridgeline.spec.errors import UserError, unknown

    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    addresses = server_addresses(servers)
    secret = read_secret(fleet_secret_file, os.environ.get(VARIABLE))
    tls = Tls.of(tls_cert, tls_key, tls_ca)
    if tls_ca and not any(address.scheme == "https" for address in addresses):
        raise UserError("--tls-ca checks the certificates of servers, and all of these are asked over http://",
                        "write https:// addresses of servers that have --tls-cert, or leave it out")  # fmt: skip
    members = Members(servers, say, member_key)
    known = Tenants(load_tenants(tenants) if tenants else ())
    routing = Router(members, POLICIES[policy](), known, Limits(wait_s=wait), admin_key, secret)
    for member in members.all:
        member.tls = tls.connecting(named=True) if tls else True
    certificate = tls.listening(mutual=False) if tls and tls.cert else None

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            loop.remove_signal_handler(signal.SIGTERM)  # a second one ends it now
            ended.set()

        loop.add_signal_handler(signal.SIGTERM, end)
        async with listening(routing, host, port, certificate):
            await ended.wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


@asynccontextmanager
async def listening(
    routing: Router, host: str, port: int, certificate: SSLContext | None = None
) -> AsyncIterator[None]:
    """The router behind its socket. Raises :class:`UserError` where it cannot listen."""
    from aiohttp import web

    from ridgeline.spec.errors import UserError

    runner = web.AppRunner(routing.app(), handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=certificate).start()
        except OSError as e:
            raise UserError(f"cannot listen on {host}:{port}: {e.strerror}", "choose another port") from None
        scheme = "https" if certificate else "http"
        say(f"routing on {scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}")
        yield
    finally:
        await runner.cleanup()
