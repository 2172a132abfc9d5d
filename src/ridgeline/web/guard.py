"""Access control of the web app: this machine's own browser pages, or clients with the token.

A page of another site may make a browser send requests to a local port, directly or by DNS rebinding. Both can be
detected: the first in ``Origin`` and ``Sec-Fetch-Site``, the second in ``Host``.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "ridgeline-token"
NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """ASGI middleware. ``hosts``: names in ``Host`` that are answered; None: any, for which a token is needed anyway.
    ``token``: what a browser must have sent once as ``?token=``; empty: none is required.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None = NAMES, token: str = "") -> None:
        if hosts is None and not token:
            raise ValueError("answering every host needs a token")
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with 401 or 403."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refused(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return

        async def guarded(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}  # type: ignore[misc]
            await send(message)

        await self.app(scope, receive, guarded)  # type: ignore[arg-type]

    def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return _no(403, f"this server does not answer to the host name {host_name(host)!r}")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return _no(403, "requests from other sites are refused")
        page = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not page:
            return _no(403, "requests from other sites are refused")
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
            return _no(415, "send application/json")
        return self._token(scope, headers)

    def _token(self, scope: Scope, headers: Headers) -> Response | None:
        if not self.token:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and hmac.compare_digest(given.encode(), self.token.encode()):
            answer = RedirectResponse(scope["path"] or "/", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        kept = _cookie(headers.get("cookie", "")) or headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(kept.encode(), self.token.encode()):
            return None
        return _no(401, "open the address with ?token=… that `ridgeline web` printed")


def host_name(host: str) -> str:
    """``Host`` without its port, in lower case."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def hosts_of(host: str) -> tuple[str, ...] | None:
    """The names that a server bound to ``host`` answers to; None: any (every interface)."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return (*NAMES, host.lower())
    if address.is_unspecified:
        return None
    return (*NAMES, f"[{address}]" if address.version == 6 else str(address))


def _cookie(header: str) -> str:
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value.strip('"')
    return ""


def _no(status: int, why: str) -> Response:
    return JSONResponse({"error": {"what": why, "fix": ""}}, status)
