"""A connection of two servers that both know the shared secret: frames in both directions, in order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ridgeline.serve.transfer.frames import HEADER, LARGEST, SMALL, TAG, BadPeer, Frame, Kind, body_length
from ridgeline.serve.transfer.frames import pack as packed
from ridgeline.serve.transfer.frames import unpack as unpacked
from ridgeline.serve.transfer.secret import derive

PING = 1.0
"""Seconds between two signs of life."""
SILENCE = 10.0
"""Seconds without a frame after which a peer counts as lost, and seconds that it may not read."""
BUFFER = 8 << 20
"""Bytes that are read ahead."""
INLINE = 1 << 14
"""Bytes of a body that is not worth another thread."""

Payload = Callable[[], dict[str, Tensor]]
"""Brings a frame's tensors to host memory; called on another thread."""


_Queued = tuple[Kind, dict[str, Any], Payload | None, int]


class Lost(Exception):
    """The connection broke."""


class Connection:
    """One end of a connection. Methods are for the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        host, port = (writer.get_extra_info("peername") or ("?", 0))[:2]
        self.peer = f"{host}:{port}"
        self.queued = 0
        """Bytes that wait to be sent, as they were announced."""
        self._urgent: deque[_Queued] = deque()
        self._bulk: deque[_Queued | Callable[[], None]] = deque()
        self._news = asyncio.Event()
        self._read_key = self._write_key = b""
        self._read = self._written = 0

    async def greet(self, secret: bytes, fingerprint: str, asks: bool) -> None:
        """Show each other that both know the secret and have the same weights; ``asks``: whether this end connected.

        Each side sends a nonce under a key of the secret, the second one's bound to the first's nonce; all later frames
        are under a key of both nonces, so that a recorded greeting is of no use. Raises :class:`BadPeer`.
        """
        own = secrets.token_hex(16)
        hello = {"nonce": own, "fingerprint": fingerprint}
        if asks:
            self._write_key = derive(secret, b"hello")
            await self._write(Kind.HELLO, hello)
            self._read_key = derive(secret, b"welcome", own.encode())
            other = await self._hello()
        else:
            self._read_key = derive(secret, b"hello")
            other = await self._hello()
            self._write_key = derive(secret, b"welcome", other["nonce"].encode())
            await self._write(Kind.HELLO, hello)
        nonces = [x.encode() for x in ((own, other["nonce"]) if asks else (other["nonce"], own))]
        keys = derive(secret, b"asks", *nonces), derive(secret, b"answers", *nonces)
        self._write_key, self._read_key = keys if asks else keys[::-1]
        if other["fingerprint"] != fingerprint:
            raise BadPeer("it serves another model, other weights or another format of the cache, or trains another"
                          " experiment")  # fmt: skip

    async def _hello(self) -> dict[str, str]:
        frame = await self.receive(SMALL)
        nonce, fingerprint = frame.message.get("nonce"), frame.message.get("fingerprint")
        if frame.kind is not Kind.HELLO or not isinstance(nonce, str) or not isinstance(fingerprint, str):
            raise BadPeer("its greeting is none")
        return {"nonce": nonce, "fingerprint": fingerprint}

    async def receive(self, most: int = LARGEST) -> Frame:
        """The next frame. Raises :class:`BadPeer`, or :class:`Lost` where the connection breaks or falls silent."""
        try:
            header = await asyncio.wait_for(self.reader.readexactly(HEADER.size), SILENCE)
            length = body_length(header, self._read, most)
            rest = await asyncio.wait_for(self.reader.readexactly(length + TAG), SILENCE)
        except asyncio.TimeoutError:
            raise Lost(f"it was silent for {SILENCE:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as e:
            raise Lost(str(e) if isinstance(e, OSError) else "it closed the connection") from None
        self._read += 1
        args = header, rest[:length], rest[length:], self._read_key
        return unpacked(*args) if length <= INLINE else await asyncio.to_thread(unpacked, *args)

    def send(self, kind: Kind, message: dict[str, Any], payload: Payload | None = None, nbytes: int = 0) -> None:
        """Queue a frame; any other goes before those of keys and values, so that a first token does not wait."""
        self.queued += nbytes
        (self._bulk if kind is Kind.KV else self._urgent).append((kind, message, payload, nbytes))
        self._news.set()

    def when_sent(self, call: Callable[[], None]) -> None:
        """Make a call once all keys and values that are queued now were sent."""
        self._bulk.append(call)
        self._news.set()

    async def pump(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Send what is queued, and while ``alive()`` a ping when nothing was for a while, until cancelled. Raises
        :class:`Lost`."""
        while True:
            if not (self._urgent or self._bulk):
                self._news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), PING)
                if not (self._urgent or self._bulk):
                    if not alive():
                        continue
                    self.send(Kind.PING, {})
            item = self._urgent.popleft() if self._urgent else self._bulk.popleft()
            if callable(item):
                item()
                continue
            kind, message, payload, nbytes = item
            await self._write(kind, message, payload)
            self.queued -= nbytes

    async def _write(self, kind: Kind, message: dict[str, Any], payload: Payload | None = None) -> None:
        number, key = self._written, self._write_key
        self._written += 1
        if payload is None:
            pieces = packed(kind, number, key, message, {})
        else:
            pieces = await asyncio.to_thread(lambda: packed(kind, number, key, message, payload()))
        try:
            self.writer.writelines(pieces)
            await asyncio.wait_for(self.writer.drain(), SILENCE)
        except asyncio.TimeoutError:
            raise Lost(f"it read nothing for {SILENCE:g} s") from None
        except OSError as e:
            raise Lost(str(e)) from None

    def close(self) -> None:
        """Close it at once."""
        self.writer.transport.abort()


async def connected(address: str, seconds: float, tls: ssl.SSLContext | None) -> Connection:
    """A connection to ``address`` (host:port), before its greeting. Raises :class:`Lost`, also after ``seconds``."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise Lost("an address is HOST:PORT")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port), limit=BUFFER, ssl=tls)
        return Connection(*await asyncio.wait_for(opening, seconds))
    except ssl.SSLError as e:
        raise Lost(f"no TLS with it: {getattr(e, 'verify_message', '') or e.reason or e}") from None
    except (OSError, ValueError, OverflowError, asyncio.TimeoutError) as e:
        raise Lost(str(e) or f"no connection within {seconds:g} s") from None


class LoopThread:
    """A thread with an event loop, beside the engine's and the web server's: large frames must not delay either."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Again until none is left: another connection may come meanwhile, and wait_for of Python 3.11 can lose a
        # cancellation that comes together with its result.
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.1))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def start(self) -> None:
        """Run."""
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the event loop, from any thread. Nothing happens once it has stopped."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel what runs, and end. Again, it only waits for that."""
        if not self._stopping:
            self._stopping = True
            self.call(self.loop.stop)
        if self._thread.is_alive():
            self._thread.join(5)
