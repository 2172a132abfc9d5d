"""Below the routes: errors in the OpenAI API's format, keys, body sizes, event streams, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.spec.errors import UserError

T = TypeVar("T")
OPEN = frozenset({"/health", "/ready", "/ping", "/version"})
"""Paths that need no key."""
PING_SECONDS = 15.0
BODY_SECONDS = 60.0
"""Seconds for a whole body to arrive."""
WRITE_SECONDS = 60.0
"""Seconds without reading after which a client counts as gone."""


class ClientDisconnected(Exception):
    """The client has closed the connection."""


VLLM_PATHS = frozenset({"/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize"})
VLLM_KINDS = {400: "BadRequestError", 404: "NotFoundError"}
"""Types of errors as vLLM names them."""


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """``{"error": …}`` in the OpenAI API's format; of a ``path`` that vLLM has made, with its names of types."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if path.removeprefix("/v1").removeprefix("/v2") in VLLM_PATHS:
        kind = VLLM_KINDS.get(status, kind)
    # Clients of Anthropic's API want the outer type too, and those of OpenAI's do not mind it.
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


class Json(JSONResponse):
    """A JSON response in ASCII, so that anything a client sent can be quoted."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def refusal(
    status: int, message: str, param: str | None = None, code: str | None = None, retry_after: float | None = None,
    close: bool = False, path: str = "",
) -> Json:  # fmt: skip
    """An error response. ``close``: also close the connection, even if part of the request is still to arrive.
    ``path``: as for :func:`error_body`."""
    headers = {} if retry_after is None else {"retry-after": str(math.ceil(retry_after))}
    if close:
        headers["connection"] = "close"
    return Json(error_body(status, message, param, code, path), status, headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, None]) -> T:
    """The result of ``work``, which is cancelled when one of ``ends`` comes first, or when the client disconnects.

    Raises :class:`ClientDisconnected` then.
    """
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(end) for end in (_disconnect(receive), *ends)]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for t in (task, *watches):
            t.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _by(until: float, receive: Receive) -> Message | None:
    """The next message; None if it has not arrived by then."""
    task = asyncio.ensure_future(receive())
    try:  # asyncio.wait_for would lose cancellations (Python < 3.12)
        await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        return task.result() if task.done() else None
    finally:
        task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of ``chunks``: one ``data:`` line each, a comment when nothing comes for a while.

    ``typed``: chunks are events that have names, and a last one among them; otherwise ``[DONE]`` ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Any, None], typed: bool = False) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.chunks, self.typed = chunks, typed
        self._writing: float | None = None
        """Time since which a write has been waiting for the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until they end or the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(ClientDisconnected, OSError):
            try:
                await unless_gone(receive, self._write(send), self._stuck())
            finally:
                await self.chunks.aclose()

    async def _stuck(self) -> None:
        """Return when the client has read nothing for too long."""
        while self._writing is None or time.monotonic() - self._writing < WRITE_SECONDS:
            await asyncio.sleep(WRITE_SECONDS / 10)

    async def _write(self, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            self._writing = time.monotonic()  # asyncio.wait_for would lose cancellations (Python < 3.12)
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._writing = None

        following: asyncio.Future[Any] = asyncio.ensure_future(anext(self.chunks))
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=PING_SECONDS)
                if not done:
                    await put(b": ping\n\n")
                    continue
                try:
                    chunk = following.result()
                except StopAsyncIteration:
                    break
                following = asyncio.ensure_future(anext(self.chunks))
                name = f"event: {chunk['type']}\n" if self.typed else ""
                await put(f"{name}data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode("ascii"))
            await put(b"" if self.typed else b"data: [DONE]\n\n", more=False)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class Passed(Response):
    """What another route of ``app`` answers to a request, whose body has been read already."""

    def __init__(self, app: ASGIApp, path: str, body: bytes) -> None:
        super().__init__()
        self._app, self._path, self._body = app, path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        await self._app({**scope, "path": self._path}, replayed(self._body, receive), send)


def replayed(body: bytes, receive: Receive) -> Receive:
    """``receive`` after a whole ``body``."""
    whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal whole
        if whole is None:
            return await receive()
        message, whole = whole, None
        return message

    return replay


class Keys:
    """API keys, compared in constant time by their SHA-256; without any key, everyone has access.

    Raises :class:`UserError` for a key that is empty: a variable that is not set must not open a server."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if not all(keys) or any(key != key.strip() for key in keys):
            raise UserError("an API key is empty, or has blanks around it", "give a key: is its variable set?")
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def fits(self, key: bytes) -> bool:
        """Whether ``key`` is one of them; all are compared."""
        given = hashlib.sha256(key).digest()
        fits = False
        for known in self._hashes:
            fits |= hmac.compare_digest(known, given)
        return fits


def bearer(scope: Scope) -> bytes:
    """The key of a request, as OpenAI's clients or as Anthropic's send it; empty: none."""
    headers = dict(reversed(scope["headers"]))
    value = headers.get(b"authorization", b"")
    return bytes(value[7:].strip() if value[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"").strip())


def _identified(scope: Scope, send: Send) -> Send:
    """``send`` with the request's id in the answer's head, and, for HEAD, without its body."""
    given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
    name = given if re.fullmatch(rb"[!-~]{1,128}", given) else uuid.uuid4().hex.encode()
    head = scope["method"] == "HEAD"

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
        elif head and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return answer


class Gate:
    """Middleware: keys and body sizes, before anything is read. Ordinary keys open all but ``admin`` paths.

    A path may end with a slash, HEAD is a GET without its body, and every answer has an ``X-Request-Id``: the
    request's own, or a new one. A path may begin with ``root_path``.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, admin: Keys, admin_paths: frozenset[str], max_body: int, root_path: str = ""
    ) -> None:
        self.app, self.keys, self.admin, self.admin_paths, self.max_body = app, keys, admin, admin_paths, max_body
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or read the whole body and pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head, send = scope["method"] == "HEAD", _identified(scope, send)
        path = scope["path"]
        if self.root_path and f"{path}/".startswith(f"{self.root_path}/"):
            path = path[len(self.root_path) :]
        scope = {**scope, "path": path.rstrip("/") or "/", "method": "GET" if head else scope["method"]}
        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        body, more, until = b"", True, time.monotonic() + BODY_SECONDS
        while more:
            message = await _by(until, receive)
            if message is None:
                await refusal(408, f"the body did not come within {BODY_SECONDS:g} s", close=True)(scope, receive, send)
                return
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body:
                await self._large()(scope, receive, send)
                return
        await self.app(scope, replayed(body, receive), send)

    def _refused(self, scope: Scope) -> Json | None:
        path, key = scope["path"].rstrip("/") or "/", bearer(scope)
        if path in self.admin_paths:
            if not self.admin:
                what = "the server was started without an admin key: adapters and cache cannot be changed"
                return refusal(403, what, close=True)
            if not self.admin.fits(key):
                what = "this needs the admin key, as `Authorization: Bearer KEY`"
                return refusal(401, what, code="invalid_api_key", close=True)
        elif self.keys and path not in OPEN and not (self.keys.fits(key) or self.admin.fits(key)):
            what = "no valid API key, as `Authorization: Bearer KEY`"
            return refusal(401, what, code="invalid_api_key", close=True)
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        return self._large() if length.isdigit() and int(length[:18]) > self.max_body else None

    def _large(self) -> Json:
        return refusal(413, f"the body has more than {self.max_body} bytes", close=True)
