"""Limits on idle clients: the number of connections, and the time in which a request's head must arrive.

The time for a body is :class:`ridgeline.serve.http.Gate`'s, that for taking an answer :class:`EventStream`'s and the
kernel's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ridgeline.serve.http import WRITE_SECONDS, error_body

HEAD_SECONDS = 30.0
"""Seconds from the start of a connection, or from the first byte of a later request, to the end of the head."""


class ServerConnection(H11Protocol):
    """Uvicorn's connection, which is closed when no request comes, and refused when there are ``most`` already."""

    most: int | None = None
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer it with 503."""
        super().connection_made(transport)
        if self.most is not None and len(self.connections) > self.most:
            body = json.dumps(error_body(503, f"{self.most} connections are open already", code="overloaded")).encode()
            head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            transport.close()
            return
        _detect_dead_peer(transport.get_extra_info("socket"))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Receive data."""
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._cancel_timeout()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def connection_class(most: int | None) -> type[ServerConnection]:
    """Connections of which there may be ``most`` (None: any number)."""
    return type("Limited", (ServerConnection,), {"most": most})


def _detect_dead_peer(peer: socket.socket) -> None:
    """Have the kernel close a connection whose peer is gone or does not read."""
    with contextlib.suppress(OSError, AttributeError):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000))
