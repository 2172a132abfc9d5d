"""One OpenAI endpoint before several servers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from ridgeline.fleet.exposition import merged
from ridgeline.fleet.members import PATIENCE, PLAIN, Member, Members
from ridgeline.fleet.policies import Policy
from ridgeline.fleet.pools import Pools
from ridgeline.fleet.tenants import Tenant, Tenants
from ridgeline.serve.transfer.secret import HEADER, signed

LARGEST = 64 << 20
"""Bytes of a request's body at most."""
ENDS = ("response.completed", "response.incomplete", "response.failed")
"""Events of ``/v1/responses`` that end an answer."""
AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which another member is asked: this one is full, or not there."""
HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers",
                 "transfer-encoding", "upgrade", "host", "content-length"})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1), and those that are made anew."""
KEYS = ("authorization", "x-api-key")
"""Headers with a key: of OpenAI's clients, and of Anthropic's."""
IDLE = 2.0
"""Seconds that an idle connection to a member is kept: fewer than the five after which servers close theirs."""


@dataclass
class Limits:
    """Limits of a router."""

    wait_s: float = 30.0
    """Seconds that a request waits for a member to come up."""
    connect_s: float = 5.0
    """Seconds for a connection to a member."""


class Router:
    """Forwards requests. ``admin_key``: what drains members; empty: only requests of this machine do."""

    def __init__(
        self, members: Members, policy: Policy, tenants: Tenants | None = None, limits: Limits | None = None,
        admin_key: str = "", secret: bytes = b"",
    ) -> None:  # fmt: skip
        """``secret``: the fleet's, with which it names prefill servers to decode servers."""
        self.members, self.policy = members, policy
        self.tenants, self.limits, self.admin_key = tenants or Tenants(), limits or Limits(), admin_key
        self.secret, self.pools = secret, Pools(members.say)
        self.retries = self.broken = 0
        self.restart: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Restarts the members that this process has started, one after another."""
        self.down: Callable[[], None] | None = None
        self.started: list[str] = []
        """Addresses of these members."""
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """The application, which watches the members while it runs."""
        app = web.Application(client_max_size=LARGEST)
        app.cleanup_ctx.append(self._session)
        for path, handler in (
            ("/health", self.health), ("/ready", self.health), ("/ping", self.health), ("/version", self.version),
            ("/v1/models", self.models), ("/metrics", self.metrics), ("/fleet", self.status),
        ):  # fmt: skip
            app.router.add_get(f"{path}{{slash:/?}}", handler)
        app.router.add_post("/ping{slash:/?}", self.health)
        app.router.add_post("/fleet/{action:drain|resume}", self.manage)
        app.router.add_post("/fleet/{action:restart|down}", self.control)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _session(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE), auto_decompress=False,
            skip_auto_headers=["Accept-Encoding"],
        ) as self.session:  # fmt: skip
            watch = asyncio.create_task(self.members.watch(self.session))
            yield
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    # ---- what it says of itself --------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        """200 while any member is up."""
        if self.members.able(None):
            return web.json_response({"status": "ok"})
        return _error(503, "no server of this fleet is up", "service_unavailable")

    async def version(self, request: web.Request) -> web.StreamResponse:
        """That of a member, which asks for no key either."""
        return await self._forwarded(request, b"")

    async def models(self, request: web.Request) -> web.Response:
        """Models and adapters of all members that are up."""
        if (refused := self._unknown(request)) is not None:
            return refused
        listed = {name: told for m in reversed(self.members.able(None)) for name, told in m.models.items()}
        data = [{"object": "model", "created": 0, "owned_by": "", **listed[name]} for name in sorted(listed)]
        return web.json_response({"object": "list", "data": data})

    async def status(self, _: web.Request) -> web.Response:
        """Members with their states and counts."""
        members = [
            {"url": m.url, "state": m.state, "models": sorted(m.models), "running": m.running, "sent": m.sent,
             "failed": m.failed, "role": m.role, "lent": m.lent} for m in self.members.all
        ]  # fmt: skip
        return web.json_response({"members": members, "retries": self.retries, "broken": self.broken})

    async def metrics(self, _: web.Request) -> web.Response:
        """The router's counts and every member's metrics, with the label ``member``."""
        asked = [m for m in self.members.all if m.state in ("up", "draining")]
        texts = await asyncio.gather(*(self._scraped(m) for m in asked))
        text = merged([(m.url, text) for m, text in zip(asked, texts, strict=True)], self.members.all, self.retries,
                      self.broken)  # fmt: skip
        return web.Response(text=text, content_type="text/plain")

    async def _scraped(self, member: Member) -> str:
        try:
            timeout = aiohttp.ClientTimeout(total=PATIENCE)
            url, headers = f"{member.url}/metrics", self.members.headers | PLAIN
            async with self.session.get(url, headers=headers, timeout=timeout, ssl=member.tls) as answer:
                return await answer.text()
        except (aiohttp.ClientError, asyncio.TimeoutError, UnicodeDecodeError):
            return ""

    async def manage(self, request: web.Request) -> web.Response:
        """Drain a member (it finishes what it has) or let it have requests again."""
        if not self._may_manage(request):
            return _error(403, "drain and resume need the admin key", "permission_error")
        try:
            url = str((await request.json())["url"])
        except (ValueError, KeyError, TypeError):
            return _error(400, 'give {"url": "http://…"} of a member', "invalid_request_error")
        member = self.members.find(url)
        if member is None:
            known = ", ".join(m.url for m in self.members.all)
            return _error(404, f"{url} is no member of this fleet: {known}", "invalid_request_error")
        if request.match_info["action"] == "drain":
            member.become("draining")
        elif member.become("down"):  # until the next look at its health
            self.policy.forget(member)
        return web.json_response({"url": member.url, "state": member.state, "running": member.running})

    async def control(self, request: web.Request) -> web.Response:
        """Restart all members one after another, or end the fleet."""
        if not self._may_manage(request):
            return _error(403, "restart and down need the admin key", "permission_error")
        if self.restart is None or self.down is None:
            return _error(409, "these servers were not started by the router", "invalid_request_error")
        if request.match_info["action"] == "down":
            self.down()
        else:
            task = asyncio.create_task(self.restart())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return web.json_response({"members": self.started}, status=202)

    def _may_manage(self, request: web.Request) -> bool:
        """By the admin key; without one only a program of this machine: no page in a browser, nobody behind a proxy."""
        if self.admin_key:
            return self._brings(request, self.admin_key)
        foreign = any(name in request.headers for name in ("Origin", "Forwarded", "X-Forwarded-For"))
        if foreign or request.content_type != "application/json":
            return False
        try:
            return all(ipaddress.ip_address(x or "").is_loopback for x in (request.remote, _host(request)))
        except ValueError:
            return False

    @staticmethod
    def _brings(request: web.Request, key: str) -> bool:
        return hmac.compare_digest(key_of(request), key.encode())

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _unknown(self, request: web.Request) -> web.Response | None:
        """The refusal of a request without a tenant's key, or where there are no tenants, without the members' own."""
        if self.tenants.all:
            known = self.tenants.find(key_of(request)) is not None
        else:
            known = not self.members.key or self._brings(request, self.members.key)
        return None if known else _error(401, "the API key is not known here", "authentication_error")

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Send a request to a member, and to another one as long as nothing of an answer was passed on."""
        if (refused := self._unknown(request)) is not None:
            return refused
        tenant = self.tenants.find(key_of(request))
        if tenant is not None and (wait := self.tenants.refusal(tenant)) is not None:
            headers = {"Retry-After": str(max(1, round(wait[1])))}
            return _error(429, wait[0], "rate_limit_error", headers)
        try:
            return await self._forwarded(request, await request.read())
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body has more than {LARGEST} bytes", "invalid_request_error")
        finally:
            _left(tenant)

    async def _forwarded(self, request: web.Request, body: bytes) -> web.StreamResponse:
        model, prompt = described(body)
        tried: set[Member] = set()
        last: web.Response | None = None
        while (found := await self._next(model, prompt, tried)) is not None:
            member, prefill = found
            self.retries += bool(tried)
            tried.add(member)
            member.running += 1
            member.sent += 1
            reply = Reply(request)
            try:
                last = await self._unless_lost(member, self._ask(member, prefill, request, body, reply))
                if last is None or last.status not in AGAIN:
                    return last or reply.response
                member.failed += 1
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as e:
                if request.transport is None or request.transport.is_closing():
                    raise  # the client has left
                member.failed += 1
                self.members.lose(member, str(e) or type(e).__name__)
                if reply.begun:
                    self.broken += 1
                    return await reply.cut_short(member.url)
            finally:
                member.running -= 1
        return last or _error(503, "no server of this fleet is up", "service_unavailable")

    async def _next(self, model: str | None, prompt: str, tried: set[Member]) -> tuple[Member, Member | None] | None:
        """The member to ask, and the one that computes the prompt for it, if another does; waits where none is up.
        None: all were tried."""
        deadline = asyncio.get_running_loop().time() + self.limits.wait_s
        while True:
            known = self.members.listing(model)  # a model that nobody has listed is refused by whoever is asked
            able = self.members.able(model) if known else self.members.able(None)
            left = [m for m in able if m not in tried]
            if left and self.secret and prompt and self.pools.divided(able):
                return self.pools.choose(left, able, prompt)
            if left:
                return self.policy.choose(left, prompt), None
            if able or asyncio.get_running_loop().time() > deadline:
                return None
            await asyncio.sleep(0.05)
            tried.clear()  # who was down may be up again

    async def _unless_lost(
        self, member: Member, asking: Coroutine[Any, Any, web.Response | None]
    ) -> web.Response | None:
        """The answer, unless the member goes down meanwhile: then :class:`aiohttp.ClientError`."""
        answer, lost = asyncio.ensure_future(asking), asyncio.ensure_future(member.lost.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise aiohttp.ClientError("it went down before it had answered")
            return answer.result()
        finally:
            for task in (answer, lost):
                task.cancel()
            await asyncio.gather(answer, lost, return_exceptions=True)

    async def _ask(
        self, member: Member, prefill: Member | None, request: web.Request, body: bytes, reply: Reply
    ) -> web.Response | None:
        """A member's answer; None where it was streamed. Raises what a connection raises."""
        checked = bool(self.tenants.all or self.members.key)  # a key that is not checked here is for the member
        own = {*HOP, HEADER.lower(), *(KEYS if checked else ())}
        headers = {k: v for k, v in request.headers.items() if k.lower() not in own} | self.members.headers
        if prefill is not None:
            headers[HEADER] = signed(self.secret, prefill.source)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_s)
        async with self.session.request(
            request.method, member.url + request.path_qs, data=body or None, headers=headers, timeout=timeout,
            allow_redirects=False, ssl=member.tls,
        ) as answer:  # fmt: skip
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            if answer.content_type != "text/event-stream":
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            await reply.stream(answer, kept)
            return None


class Reply:
    """A streamed answer on its way to a client: held back until it has a token, and passed on event by event."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.response = web.StreamResponse()
        self.begun = False
        self.named = False
        """Whether the events have names, as Anthropic's do, whose clients skip one without."""

    async def stream(self, answer: aiohttp.ClientResponse, headers: dict[str, str]) -> None:
        """Pass events on. Raises what the connection raises; ``begun``: whether the client has got anything."""
        held = rest = b""
        async for data in answer.content.iter_any():
            events, end, rest = (rest + data).rpartition(b"\n\n")
            whole = events + end
            self.named = self.named or whole.startswith(b"event:")
            if not self.begun and not has_token(whole):
                held += whole
                continue
            await self._write(answer.status, headers, held + whole)
            held = b""
        await self._write(answer.status, headers, held + rest)
        await self.response.write_eof()

    async def _write(self, status: int, headers: dict[str, str], events: bytes) -> None:
        if not self.begun:
            self.response = web.StreamResponse(status=status, headers=headers)
            self.begun = True
            await self.response.prepare(self.request)
        if events:
            await self.response.write(events)

    async def cut_short(self, url: str) -> web.StreamResponse:
        """Tell the client that the answer broke off: what it has cannot be taken back."""
        message = f"the server at {url} was lost in the middle of the answer"
        event = {"type": "error", "error": {"message": message, "type": "server_error", "code": 502}}
        name = "event: error\n" if self.named else ""
        with contextlib.suppress(ConnectionError):
            await self.response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
            await self.response.write_eof()
        return self.response


def has_token(events: bytes) -> bool:
    """Whether server-sent events hold more than the roles with which chats begin."""
    for line in events.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            chunk = json.loads(line[5:])
        except ValueError:
            if line[5:].strip() == b"[DONE]":
                return True
            continue  # the rest of it is still to come
        if not isinstance(chunk, dict):
            return True
        if str(kind := chunk.get("type", "")).startswith("response.") and kind not in ENDS:
            if kind.endswith(".delta"):
                return True
            continue
        block = chunk.get("content_block")  # of Anthropic's messages, where one of text or thinking begins empty
        if kind in ("message_start", "ping") or (isinstance(block, dict) and "name" not in block):
            continue
        choices = chunk.get("choices")
        if choices is None or any(_says(c) for c in choices):
            return True
    return False


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    said = [v for k, v in delta.items() if k != "role"]
    return any(said) or bool(choice.get("text")) or choice.get("finish_reason") is not None


def described(body: bytes) -> tuple[str | None, str]:
    """Model and text of a request, as far as it has them: what requests with the same beginning share."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(asked, dict):
        return None, ""
    model = asked.get("model")
    for name in ("messages", "prompt", "input"):
        if (given := asked.get(name)) is not None:
            text = given if isinstance(given, str) else json.dumps(given)[:-1]  # what follows may be more of a list
            return model if isinstance(model, str) else None, f"{model}\n{text}"
    return model if isinstance(model, str) else None, ""


def key_of(request: web.Request) -> bytes:
    """The key of a request, as servers read it; empty: none."""
    value = request.headers.get("Authorization", "")
    key = value[7:] if value[:7].lower() == "bearer " else request.headers.get("X-Api-Key", "")
    return key.strip().encode(errors="surrogateescape")


def _host(request: web.Request) -> str:
    """The host that a request names, as an address."""
    name = urllib.parse.urlsplit(f"//{request.host}").hostname or ""
    return "127.0.0.1" if name == "localhost" else name


def _left(tenant: Tenant | None) -> None:
    if tenant is not None:
        tenant.running -= 1


def _error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> web.Response:
    code = "invalid_api_key" if status == 401 else None
    body = {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)
