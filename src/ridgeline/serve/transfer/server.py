"""The prefill server's connections: prompts in, keys and values out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, create_model

from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.transfer.connection import BUFFER, Connection, LoopThread, Lost
from ridgeline.serve.transfer.counts import TransferCounts
from ridgeline.serve.transfer.exports import Exports, FirstToken, Outgoing, Parcel
from ridgeline.serve.transfer.frames import BadPeer, Frame, Kind
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine

MOST_WAITING = 512
"""Prompts that wait here at most: a decode server computes more than these itself."""
MOST_QUEUED = 1 << 30
"""Bytes that wait to be sent to one peer at most, before it gets no more."""
Post = Callable[[Callable[[], None]], None]
"""Has the engine's thread call something between two steps."""
SENT = create_model(
    "SentSampling",
    __config__=ConfigDict(extra="forbid"),
    **{
        name: (kind, ...)
        for name, kind in get_type_hints(Sampling).items()
        if name not in ("grammar", "prompt_logprobs")
    },
)  # type: ignore[call-overload]
"""Sampling parameters that are sent: those that a first token depends on, and the others as they are."""


class PrefillServer:
    """Listens for decode servers. ``say`` gets a line for each peer that is refused."""

    def __init__(
        self, engine: Engine, exports: Exports, post: Post, secret: bytes, fingerprint: str, counts: TransferCounts,
        say: Callable[[str], None], tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.draining: Callable[[], bool] = lambda: False
        """Whether new prompts are refused."""
        self.alive: Callable[[], bool] = lambda: True
        """Whether the engine is; decode servers do not wait for one that is not."""
        self.engine, self.exports, self.post, self.counts, self.say = engine, exports, post, counts, say
        self._secret, self._fingerprint, self._tls = secret, fingerprint, tls
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = LoopThread("prefill-server")

    def listen(self, host: str, port: int) -> int:
        """Listen → the port. Raises :class:`UserError` for a taken one."""
        try:
            sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as e:
            what = f"cannot listen for decode servers on {host}:{port}: {e.strerror}"
            raise UserError(what, "choose another --transfer-port") from None
        self.thread.start()
        start = asyncio.start_server(self._accept, sock=sock, limit=BUFFER, ssl=self._tls)
        asyncio.run_coroutine_threadsafe(start, self.thread.loop).result(10)
        return int(sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.thread.stop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        scope = f"{next(self._numbers)}/"
        pump: asyncio.Task[None] | None = None
        names: set[str] = set()
        try:
            await connection.greet(self._secret, self._fingerprint, asks=False)
            pump = asyncio.create_task(connection.pump(lambda: self.alive()))
            pump.add_done_callback(lambda _: connection.close())  # which ends the reading below
            while True:
                self._take(connection, scope, names, await connection.receive())
        except BadPeer as e:
            self.counts.refused.inc()
            self.say(f"decode server {connection.peer} refused: {e}")
        except Lost as e:
            if names:
                self.say(f"decode server {connection.peer} lost: {e}; prompts dropped: {len(names)}")
        finally:
            connection.close()
            if pump is not None:
                pump.cancel()
                with contextlib.suppress(asyncio.CancelledError, Lost):
                    await pump
            for name in names:
                self.post(partial(self.exports.cancel, scope + name))

    def _take(self, connection: Connection, scope: str, names: set[str], frame: Frame) -> None:
        """Act on one frame. Raises :class:`BadPeer`."""
        if frame.kind is Kind.PING:
            return
        name = frame.message.get("id")
        if frame.kind not in (Kind.PREFILL, Kind.CANCEL) or not isinstance(name, str):
            raise BadPeer(f"it sent a frame {frame.kind.name} without meaning here")
        if frame.kind is Kind.CANCEL:
            names.discard(name)
            self.post(partial(self.exports.cancel, scope + name))
            return
        if name in names:
            raise BadPeer(f"it asked twice for {name!r}")
        request, start, upto = parsed(frame, scope + name)
        names.add(name)

        def send(news: Outgoing) -> None:
            self.thread.call(self._send, connection, name, names, news)

        busy = connection.queued > MOST_QUEUED or self.draining()
        self.post(partial(self._begin, request, start, upto, send, busy))

    def _begin(
        self, request: EngineRequest, start: int, upto: int, send: Callable[[Outgoing], None], busy: bool
    ) -> None:
        """On the engine's thread."""
        try:
            if busy or len(self.engine.scheduler.waiting) >= MOST_WAITING:
                send("the server is busy")
                return
            self.exports.begin(request, start, upto, send)
        except Exception as e:  # whatever is wrong with it, others must not suffer
            send(e.what if isinstance(e, UserError) else f"{type(e).__name__}: {e}")

    def _send(self, connection: Connection, name: str, names: set[str], news: Outgoing) -> None:
        if name not in names:  # cancelled
            return
        if isinstance(news, Parcel):
            layers = [news.layers.start, news.layers.stop]
            message = {"id": name, "layers": layers, "at": news.at, "tokens": news.tokens}
            size = sum(t.nbytes for t in news.tensors.values())
            self.counts.sent.inc(size)
            connection.send(Kind.KV, message, news.to_host, size)
            return
        names.discard(name)
        if isinstance(news, FirstToken):
            p = news.logprob
            logprob = None if p is None else [p.token, _number(p.logprob), [[t, _number(x)] for t, x in p.top]]
            connection.send(Kind.FIRST, {"id": name, "token": news.token, "logprob": logprob, "cached": news.cached})
            connection.when_sent(lambda: self.counts.exposed.observe(time.monotonic() - news.computed))
        else:
            connection.send(Kind.FAILED, {"id": name, "why": news})


def described(request: EngineRequest, sampling: Sampling) -> dict[str, Any]:
    """A request as a frame's message, but for the prompt."""
    values = {name: getattr(sampling, name) for name in SENT.model_fields}
    return {"id": request.id, "sampling": values, "salt": request.salt.hex(), "priority": request.priority}


def parsed(frame: Frame, name: str) -> tuple[EngineRequest, int, int]:
    """The request of a frame, and which of its tokens are wanted. Raises :class:`BadPeer`."""
    m = frame.message
    try:
        prompt = frame.tensors["tokens"].tolist()
        sampling = Sampling(**SENT.model_validate(m["sampling"]).model_dump())
        salt, priority = bytes.fromhex(m["salt"]), int(m["priority"])
        request = EngineRequest(name, prompt, sampling, salt=salt, priority=priority)
        start, upto = int(m["start"]), int(m["upto"])
    except (KeyError, TypeError, ValueError) as e:
        raise BadPeer(f"it asked for a prompt in a way that is not understood: {type(e).__name__}: {e}") from None
    if not (0 <= start < upto <= len(prompt) and all(isinstance(t, int) for t in prompt)):
        raise BadPeer(f"it asked for tokens {start} to {upto} of a prompt of {len(prompt)}")
    return request, start, upto


def _number(x: float) -> float | None:
    """A number as JSON has it; minus infinity as null."""
    return x if math.isfinite(x) else None
