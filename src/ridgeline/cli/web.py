"""`ridgeline web`: the local web app."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import app, require_package, say, store


@app.command()
def web(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8500,
    token: Annotated[
        str | None, typer.Option(help="Token that a browser must bring; made up beyond loopback if not given.")
    ] = None,
    server: Annotated[str, typer.Option(help="Inference server for the playground, e.g. http://127.0.0.1:8000.")] = "",
) -> None:
    """Plan, compare and inspect runs in a browser. Ctrl-C stops it."""
    import secrets

    for package in ("fastapi", "uvicorn"):
        require_package(package)
    import uvicorn

    from ridgeline.serve.address import loopback, require_free
    from ridgeline.spec.errors import UserError
    from ridgeline.web.app import create_app
    from ridgeline.web.guard import hosts_of

    if token == "":
        raise UserError("--token is empty", "give one, or leave it out")
    if server and not server.startswith(("http://", "https://")):
        raise UserError(f"--server {server!r} is not an address", "write http://127.0.0.1:8000")
    secret = token or ("" if loopback(host) else secrets.token_urlsafe(16))
    page = create_app(store(), server.rstrip("/"), hosts_of(host), secret)
    require_free(host, port)
    name = f"[{host}]" if ":" in host else host
    say(f"http://{name}:{port}/{f'?token={secret}' if secret else ''}   (Ctrl-C ends)")
    uvicorn.run(page, host=host, port=port, log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=1)  # fmt: skip
