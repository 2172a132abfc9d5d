"""Questions and answers between peers, over the authenticated frames of :mod:`ridgeline.serve.transfer`.

Nobody without the secret says anything; frames have bounded lengths, are numbered and signed, and hold safetensors and
JSON: nothing that is read can run code. A peer that breaks the rules is cut off (:class:`BadPeer`), one that falls
silent is lost (:class:`Lost`), one that says no is :class:`Refused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ridgeline.serve.transfer.connection import BUFFER, Connection, Lost, connected
from ridgeline.serve.transfer.frames import LARGEST, BadPeer, Frame, Kind
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError

CONNECT = 3.0
"""Seconds for a connection."""
MOST_ASKED = 64
"""Questions of one peer that are answered at the same time, at most."""
BAN = 60.0
"""Seconds that a peer that broke the rules is kept out."""


class Refused(Exception):
    """The peer understood, and says no."""


@dataclass(frozen=True)
class Answer:
    """What a peer answers."""

    message: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Shape:
    """One direction of a connection over a slower network than there is."""

    rtt: float = 0.0
    """Seconds there and back."""
    rate: float = 0.0
    """Bytes/s; 0: unlimited."""
    _free: float = 0.0

    async def hold(self, nbytes: int) -> None:
        """Wait as long as ``nbytes`` would take to arrive."""
        if not self.rtt and not self.rate:
            return
        now = time.monotonic()
        self._free = max(now, self._free) + (nbytes / self.rate if self.rate else 0.0)
        await asyncio.sleep(self._free - now + self.rtt / 2)

    def fresh(self) -> Shape:
        """The same for another direction or connection."""
        return Shape(self.rtt, self.rate)


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes of tensors."""
    return sum(t.nbytes for t in tensors.values())


class Link:
    """The asking end of a connection. For the event loop's thread."""

    def __init__(self, connection: Connection, shape: Shape) -> None:
        self.connection = connection
        self._out, self._in = shape.fresh(), shape.fresh()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._number = 0
        self._broken: Exception | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._pump())]

    @classmethod
    async def open(
        cls, address: str, secret: bytes, fingerprint: str, shape: Shape | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Link:  # fmt: skip
        """Connect to a peer of the same model. Raises :class:`Lost` or :class:`BadPeer`."""
        connection = await connected(address, CONNECT, tls)
        try:
            await connection.greet(secret, fingerprint, asks=True)
        except BaseException:
            connection.close()
            raise
        return cls(connection, shape or Shape())

    @property
    def broken(self) -> bool:
        """Whether it can no longer be used."""
        return self._broken is not None

    async def ask(
        self, op: str, message: dict[str, Any], tensors: dict[str, Tensor] | None = None, patience: float = 30.0
    ) -> Answer:
        """The answer. Raises :class:`Refused`, :class:`BadPeer` or :class:`Lost` (also after ``patience`` s)."""
        given = tensors or {}
        await self._out.hold(size_of(given))
        if self._broken is not None:
            raise self._broken
        self._number += 1
        number = self._number
        found: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = found
        self.connection.send(Kind.ASK, {**message, "op": op, "id": number}, (lambda: given) if given else None)
        try:
            frame = await asyncio.wait_for(found, patience)
        except asyncio.TimeoutError:
            raise Lost(f"it gave no answer to {op!r} for {patience:g} s") from None
        finally:
            self._waiting.pop(number, None)
        await self._in.hold(size_of(frame.tensors))
        if "refused" in frame.message:
            raise Refused(str(frame.message["refused"])[:300])
        return Answer(frame.message, frame.tensors)

    async def _read(self) -> None:
        try:
            while True:
                frame = await self.connection.receive()
                if frame.kind is Kind.PING:
                    continue
                number = frame.message.get("id")
                if frame.kind is not Kind.ANSWER or not isinstance(number, int):
                    raise BadPeer(f"it sent a frame {frame.kind.name} without meaning here")
                if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result(frame)
        except (BadPeer, Lost) as e:
            self._break(e)

    async def _pump(self) -> None:
        try:
            await self.connection.pump()
        except Lost as e:
            self._break(e)
        except Exception as e:  # a frame that is too large, for one
            self._break(Lost(f"{type(e).__name__}: {e}"))

    def _break(self, e: Exception) -> None:
        self._broken = self._broken or e
        self.connection.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(e)
                waiting.exception()  # it may have been given up

    async def close(self) -> None:
        """Close it."""
        self._break(Lost("closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Links:
    """Connections to peers, opened when they are first needed. For the event loop's thread."""

    def __init__(
        self, me: str, secret: bytes, fingerprint: str, shape: Shape | None = None, tls: Tls | None = None
    ) -> None:
        """``me``: the name that this peer asks under."""
        self._tls = tls.connecting(named=False) if tls else None
        self.me, self._secret, self._fingerprint, self._shape = me, secret, fingerprint, shape or Shape()
        self.sent = 0
        """Bytes of tensors that were sent and received."""
        self._open: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def ask(
        self, address: str, op: str, message: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None,
        patience: float = 30.0,
    ) -> Answer:  # fmt: skip
        """The answer of the peer at ``address``. Raises as :meth:`Link.ask`."""
        async with self._opening.setdefault(address, asyncio.Lock()):
            link = self._open.get(address)
            if link is None or link.broken:
                opening = Link.open(address, self._secret, self._fingerprint, self._shape, self._tls)
                link = self._open[address] = await opening
        answer = await link.ask(op, {**(message or {}), "from": self.me}, tensors, patience)
        self.sent += size_of(tensors or {}) + size_of(answer.tensors)
        return answer

    async def close(self) -> None:
        """Close all."""
        for link in list(self._open.values()):
            await link.close()


TROUBLE = (Lost, Refused, BadPeer)
"""What may happen to a question."""
Handler = Callable[[str, str, dict[str, Any], dict[str, Tensor]], Awaitable[Answer]]
"""Answers (connection, op, message, tensors). May raise :class:`Refused` or :class:`BadPeer`."""


class Listener:
    """The answering end: all connections of a server. For the event loop's thread."""

    def __init__(
        self, secret: bytes, fingerprint: str, handle: Handler, ended: Callable[[str], None],
        say: Callable[[str], None], tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``ended`` hears of every connection that is over; ``say`` gets one line for each peer that is refused."""
        self._secret, self._fingerprint, self._handle, self._ended = secret, fingerprint, handle, ended
        self.say = say
        self._tls = tls.listening(mutual=True) if tls else None
        self.refused = 0
        """Peers that broke the rules."""
        self._banned: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._number = 0

    async def listen(self, host: str, port: int) -> int:
        """Take connections → the port. Raises :class:`UserError` for a taken ``port`` (0: any)."""
        try:
            self._server = await asyncio.start_server(
                self._begin, host, port, limit=BUFFER, family=socket.AF_INET, ssl=self._tls
            )
        except OSError as e:
            raise UserError(f"nothing can listen at {host}:{port}: {e.strerror or e}", "give another --port") from None
        return int(self._server.sockets[0].getsockname()[1])

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(Connection(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection) -> None:
        self._number += 1
        name = f"{self._number}"
        asked: set[asyncio.Task[None]] = set()
        pump: asyncio.Task[None] | None = None
        who = connection.peer
        self._connections.add(connection)
        try:
            await connection.greet(self._secret, self._fingerprint, asks=False)
            pump = asyncio.create_task(connection.pump())
            pump.add_done_callback(lambda _: connection.close())
            while True:
                frame = await connection.receive(LARGEST)
                if frame.kind is Kind.PING:
                    continue
                who = self._known(connection, frame)
                if len(asked) >= MOST_ASKED:
                    raise BadPeer(f"it asked for more than {MOST_ASKED} things at once")
                task = asyncio.create_task(self._answer(connection, name, who, frame))
                asked.add(task)
                task.add_done_callback(asked.discard)
        except BadPeer as e:
            self._refuse(who, e)
        except Lost:
            pass
        finally:
            connection.close()
            self._connections.discard(connection)
            for task in (*asked, *([pump] if pump else [])):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Lost, Exception):
                    await task
            self._ended(name)

    def _known(self, connection: Connection, frame: Frame) -> str:
        """Who asks. Raises :class:`BadPeer`."""
        sender = frame.message.get("from")
        if frame.kind is not Kind.ASK or not isinstance(frame.message.get("id"), int) or not isinstance(sender, str):
            raise BadPeer(f"it sent a frame {frame.kind.name} without meaning here")
        if time.monotonic() < self._banned.get(sender, 0.0):
            connection.close()
            raise Lost("it is banned")
        return sender

    def _refuse(self, who: str, e: Exception) -> None:
        self.refused += 1
        if time.monotonic() >= self._banned.get(who, 0.0):
            self.say(f"peer {who} refused for {BAN:g} s: {e}")
        if len(self._banned) > 1000:
            self._banned.clear()
        self._banned[who] = time.monotonic() + BAN

    async def _answer(self, connection: Connection, name: str, who: str, frame: Frame) -> None:
        number, op = frame.message["id"], str(frame.message.get("op"))
        try:
            answer = await self._handle(name, op, frame.message, frame.tensors)
        except Refused as e:
            answer = Answer({"refused": str(e)})
        except BadPeer as e:
            self._refuse(who, e)
            connection.close()
            return
        except Exception as e:  # whatever is wrong with it, others must not suffer
            self.say(f"{op[:40]!r} of peer {who} failed: {type(e).__name__}: {e}")
            answer = Answer({"refused": f"it failed: {type(e).__name__}"})
        tensors = answer.tensors
        connection.send(Kind.ANSWER, {**answer.message, "id": number}, (lambda: tensors) if tensors else None)

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()  # before Python 3.12 a cancellation may be lost in wait_for; this ends the task as well
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
