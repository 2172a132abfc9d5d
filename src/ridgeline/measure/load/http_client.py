"""A small HTTP/1.1 client for streamed answers: no task per request, one time stamp per arrival of bytes.

General clients take some milliseconds between a packet and the program that counts time by it once several hundred
streams are open on a core; here a packet is stamped in the callback in which the event loop hands it over.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from ridgeline.measure.load.record import Record

MOST_ERROR_BYTES = 65536
_OPEN_AT_ONCE = 256
"""Connections under construction; a server's backlog may hold no more, and a refused one would look like its fault."""

Done = Callable[[Record], None]


class HttpExchange:
    """A request in flight: its bytes, its record, and the callback for its end."""

    __slots__ = ("body", "done", "record", "tries")

    def __init__(self, body: bytes, record: Record, done: Done) -> None:
        self.body, self.record, self.done = body, record, done
        self.tries = 0


class ClientConnection(asyncio.Protocol):
    """One connection, kept alive between exchanges. Parses heads, chunked and plain bodies, and event streams."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool, self.loop = pool, asyncio.get_running_loop()
        self.exchange: HttpExchange | None = None
        self.transport: asyncio.Transport | None = None
        self.used = False
        self._reset()

    def _reset(self) -> None:
        self.buffer = b""
        self.body = b""
        """The unread part of the body: the beginning of a line, or all of an answer that is no stream."""
        self.status = 0
        self.remaining: int | None = None
        """Bytes left of the body or of this chunk; None: until the connection closes."""
        self.chunked = self.streaming = self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def start(self, exchange: HttpExchange) -> None:
        """Send a request."""
        assert self.transport is not None
        self._reset()
        self.exchange = exchange
        exchange.record.sent = self.loop.time()
        self.transport.write(self.pool.head % len(exchange.body) + exchange.body)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived: they are stamped now, however long parsing takes."""
        now = self.loop.time()
        if self.exchange is None:
            self.close()  # no request is pending
            return
        self.buffer += data
        if not self.status and not self._head():
            return
        try:
            ended = self._chunks(now) if self.chunked else self._plain(now)
        except ValueError:
            self._fail("not HTTP", self.buffer[:100].decode("latin-1"))
            return
        if ended:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        """The server (or the pool) closed it."""
        self.pool.forget(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self.status and not self.chunked and self.remaining is None:
            self._finish()  # that is how such a body ends
        elif self.used and not self.status and not self.buffer and exchange.tries == 0:
            # Closed by the server for having been idle, just as it was used again: HTTP/1.1 clients send it anew.
            self.exchange = None
            exchange.tries = 1
            self.pool.launch(exchange)
        else:
            self._fail("cut off", str(error or "the server closed the connection"))

    def close(self) -> None:
        """Close the connection without any more callbacks of its exchange."""
        if self.transport is not None:
            self.transport.abort()

    def _head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self.buffer[:end].decode("latin-1").split("\r\n")
        self.buffer = self.buffer[end + 4 :]
        fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        words = lines[0].split(" ", 2)
        self.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 999
        self.chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        self.streaming = self.status == 200 and "text/event-stream" in fields.get("content-type", "")
        self.closing = "close" in fields.get("connection", "").lower() or not lines[0].startswith("HTTP/1.1")
        length = fields.get("content-length", "")
        self.remaining = 0 if self.chunked else int(length) if length.isdigit() else None
        return True

    def _plain(self, now: float) -> bool:
        data, self.buffer = self.buffer, b""
        self._read(data, now)
        if self.remaining is None:
            return False
        self.remaining -= len(data)
        return self.remaining <= 0

    def _chunks(self, now: float) -> bool:
        """Take whole and partial chunks off the buffer; True at the last."""
        buffer, at = self.buffer, 0
        while True:
            if self.remaining:
                part = buffer[at : at + self.remaining]
                if not part:
                    break
                at += len(part)
                self.remaining -= len(part)
                self._read(part, now)
                continue
            if buffer.startswith(b"\r\n", at):
                at += 2  # the end of the last chunk
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            size = int(buffer[at:end].partition(b";")[0], 16)
            if size == 0:
                if buffer.find(b"\r\n", end + 2) < 0:
                    break
                return True
            self.remaining, at = size, end + 2
        self.buffer = buffer[at:]
        return False

    def _read(self, data: bytes, now: float) -> None:
        assert self.exchange is not None
        self.body += data
        if not self.streaming:
            self.body = self.body[:MOST_ERROR_BYTES]
            return
        if b"\n" not in data:
            return
        *lines, self.body = self.body.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.exchange.record.event(line[5:].strip(), now)

    def _finish(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        record = exchange.record
        if self.status != 200:
            record.fail(f"HTTP {self.status}", message_of(self.body))
        elif not self.streaming:
            record.fail("not a stream", self.body[:200].decode("utf-8", "replace"))
        elif record.end is None:
            record.fail("empty answer")
        elif record.finish is None:
            record.fail("cut off", "the stream ended without a finish_reason")
        self.exchange, self.used = None, True
        if self.closing or self.remaining is None:
            self.close()
        else:
            self.pool.idle.append(self)
        self.pool.finish(exchange)

    def _fail(self, kind: str, detail: str) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.record.fail(kind, detail)
        self.close()
        self.pool.finish(exchange)


class ConnectionPool:
    """Connections to one address. ``url``: where requests are posted; ``headers``: sent with each."""

    def __init__(self, url: str, headers: dict[str, str], timeout: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.timeout = timeout
        lines = [f"POST {parts.path}{'?' + parts.query if parts.query else ''} HTTP/1.1", f"host: {parts.netloc}",
                 "content-type: application/json", "accept: text/event-stream",
                 *(f"{k}: {v}" for k, v in headers.items())]  # fmt: skip
        self.head = "\r\n".join(lines).replace("%", "%%").encode() + b"\r\ncontent-length: %d\r\n\r\n"
        self.idle: list[ClientConnection] = []
        self.in_flight: dict[HttpExchange, ClientConnection | None] = {}
        self.opening = asyncio.Semaphore(_OPEN_AT_ONCE)
        self.tasks: set[asyncio.Task[None]] = set()
        self.context = ssl.create_default_context() if self.tls else None

    def send(self, body: bytes, record: Record, done: Done) -> None:
        """Send a request; ``done`` is called once, at its end or failure."""
        self.launch(HttpExchange(body, record, done))

    def launch(self, exchange: HttpExchange) -> None:
        """Start an exchange on an idle connection, or on a new one."""
        self.in_flight[exchange] = None
        while self.idle:
            connection = self.idle.pop()
            assert connection.transport is not None
            if not connection.transport.is_closing():
                self.in_flight[exchange] = connection
                connection.start(exchange)
                return
        task = asyncio.ensure_future(self._connect(exchange))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self.opening:
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self), self.host, self.port, ssl=self.context
                )
        except ConnectionRefusedError as e:
            exchange.record.fail("connection refused", str(e))
        except ssl.SSLError as e:
            exchange.record.fail("TLS", str(e))
        except OSError as e:
            exchange.record.fail("cannot connect", str(e))
        else:
            if exchange in self.in_flight:
                self.in_flight[exchange] = connection
                connection.start(exchange)
            else:
                connection.close()  # aborted meanwhile
            return
        self.finish(exchange)

    def finish(self, exchange: HttpExchange) -> None:
        """An exchange is over."""
        if exchange in self.in_flight:
            del self.in_flight[exchange]
            exchange.done(exchange.record)

    def forget(self, connection: ClientConnection) -> None:
        """A connection is closed."""
        if connection in self.idle:
            self.idle.remove(connection)

    def expire(self, now: float) -> None:
        """Fail requests that exceed the timeout. To be called periodically."""
        for exchange in list(self.in_flight):
            if now - exchange.record.intended > self.timeout:
                self._give_up(exchange, "timeout", f"no end within {self.timeout:g} s")

    def drop_all(self) -> None:
        """Fail all requests in flight as interrupted, and close every connection."""
        for exchange in list(self.in_flight):
            self._give_up(exchange, "interrupted", "")
        for connection in list(self.idle):
            connection.close()
        for task in self.tasks:
            task.cancel()

    def _give_up(self, exchange: HttpExchange, kind: str, detail: str) -> None:
        exchange.record.fail(kind, detail)
        connection = self.in_flight.get(exchange)
        if connection is not None:
            connection.exchange = None
            connection.close()
        self.finish(exchange)


def message_of(body: bytes) -> str:
    """The message in an error's body, in any of the forms that servers use; else the body's beginning."""
    try:
        found = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip()
    for _ in range(3):
        if isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, dict):
            found = next((found[k] for k in ("error", "message", "detail", "msg") if found.get(k)), str(found))
    return str(found)
