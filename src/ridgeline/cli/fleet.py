"""`ridgeline fleet`: servers as processes behind one endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, app, require_package, say

if TYPE_CHECKING:
    from ridgeline.fleet.processes import Fleet

fleet = typer.Typer(no_args_is_help=True, help="Run several servers behind one endpoint, and manage them.")
app.add_typer(fleet, name="fleet")
TlsCa = Annotated[
    Path | None, typer.Option(help="Authority of the router's certificate (PEM); the system's, if it is not given.")
]
At = Annotated[str, typer.Option("--at", help="Address of the fleet's router.")]
AdminKey = Annotated[str, typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="API key for managing the fleet.")]
URL = "http://127.0.0.1:8080"


@fleet.command()
def up(
    file: Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file (TOML).")],
    admin_key: AdminKey = "",
    member_key: Annotated[
        str, typer.Option(envvar="RIDGELINE_API_KEY", help="API key of the servers (and of clients, without tenants).")
    ] = "",
) -> None:
    """Start a fleet's servers and its router; restart servers that end. Ctrl-C ends all of them."""
    for package in ("fastapi", "uvicorn"):
        require_package(package)
    require_package("aiohttp", "fleet")
    import asyncio
    import contextlib

    from ridgeline.fleet.processes import Fleet, load_fleet

    table, tenants = load_fleet(file)

    async def run() -> None:
        await _serve(Fleet(table, tenants, say, admin_key, member_key))

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


async def _serve(running: Fleet) -> None:
    import asyncio
    import signal

    from ridgeline.cli.router import listening

    for ended in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(ended, running.down)

    table, tls = running.file.fleet, running.file.tls
    certificate = tls.listening(mutual=False) if tls else None
    async with listening(running.router, table.host, table.port, certificate):
        await running.run()


@fleet.command()
def status(at: At = URL, json: Json = False, tls_ca: TlsCa = None) -> None:
    """Show a fleet's servers: states, requests, models."""
    import json as js

    found = _call(at, "fleet", tls_ca)
    if json:
        print(js.dumps(found))
        return
    for m in found["members"]:
        role = f"  {m['role']}{' (mixed for now)' if m['lent'] else ''}" if m["role"] else ""
        print(f"{m['url']}  {m['state']}{role}  {m['running']} running, {m['sent']} sent, {m['failed']} failed  "
              f"{', '.join(m['models'])}")  # fmt: skip
    print(f"{found['retries']} requests asked of another server, {found['broken']} answers cut short")


@fleet.command()
def drain(
    server: Annotated[str, typer.Argument(help="Address of the server.")], at: At = URL, admin_key: AdminKey = "",
    tls_ca: TlsCa = None,
) -> None:  # fmt: skip
    """Let a server finish its requests, and send it no more."""
    found = _call(at, "fleet/drain", tls_ca, {"url": server}, admin_key)
    print(f"{found['url']} is draining: {found['running']} running")


@fleet.command()
def resume(
    server: Annotated[str, typer.Argument(help="Address of the server.")], at: At = URL, admin_key: AdminKey = "",
    tls_ca: TlsCa = None,
) -> None:  # fmt: skip
    """Send requests to a drained server again, once it is healthy."""
    print(f"{_call(at, 'fleet/resume', tls_ca, {'url': server}, admin_key)['url']} takes requests when it is healthy")


@fleet.command()
def restart(at: At = URL, admin_key: AdminKey = "", tls_ca: TlsCa = None) -> None:
    """Restart all servers, one after another, without losing a request."""
    members = _call(at, "fleet/restart", tls_ca, {}, admin_key)["members"]
    print(f"{len(members)} servers are restarted one after another")


@fleet.command()
def down(at: At = URL, admin_key: AdminKey = "", tls_ca: TlsCa = None) -> None:
    """End a fleet."""
    print(f"{len(_call(at, 'fleet/down', tls_ca, {}, admin_key)['members'])} servers end")


def _call(at: str, path: str, ca: Path | None, body: dict[str, Any] | None = None, key: str = "") -> Any:
    """The router's answer. Raises :class:`UserError` for a refusal, or where there is no router."""
    import json
    import ssl
    import urllib.error
    import urllib.request

    from ridgeline.serve.transfer.tls import Tls
    from ridgeline.spec.errors import UserError

    encrypted = at.startswith("https://")
    if ca and not encrypted:
        raise UserError(f"--tls-ca checks a certificate, and {at} shows none", "give --at https://…")
    tls = Tls(ca=ca).connecting(named=True) if encrypted else None
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        request = urllib.request.Request(f"{at.rstrip('/')}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=30, context=tls) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        text = e.read(2000).decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = f"the answer was {e.code}"
        raise UserError(f"{at}: {text}", "is it the address of a fleet's router?") from None
    except (OSError, ValueError) as e:
        if isinstance(refused := getattr(e, "reason", None), ssl.SSLCertVerificationError):
            fix = "give --tls-ca with its authority's certificate, and --at with the name that it is for"
            raise UserError(f"{at}: its certificate is not accepted: {refused.verify_message}", fix) from None
        fix = "start one with `ridgeline fleet up FILE`, or give --at with its address, https:// if it is encrypted"
        raise UserError(f"no fleet at {at}: {e}", fix) from None
