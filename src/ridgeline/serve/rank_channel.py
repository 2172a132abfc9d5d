"""Messages from rank 0 to the other ranks: through memory that they share, or between machines by broadcast.

The memory is a ring of chunks (as vLLM's ``ShmRingBuffer``) that has no name, so that nothing is left behind whatever
ends a process. A Unix socket to each reader tells of a chunk by a byte, and by a byte back that it was read: nobody
spins while it waits, and the end of a process is seen at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

CHUNK, CHUNKS = 1 << 18, 8
"""Bytes of a chunk, and chunks of the ring; a message may take any number of them."""
_HEAD = 8
_WAIT = 60.0
"""Seconds that rank 0 waits for a reader when the ring is full."""
_CLOSE = 5.0
"""And at the end, for what was sent to be read."""


class RankLost(RuntimeError):
    """The ranks are out of sync: nothing can be served."""


class Channel(Protocol):
    """From rank 0 to all others; each message is of one byte or more."""

    def send(self, message: bytes) -> None:
        """Send to all. Raises :class:`RankLost` when one has gone."""

    def receive(self) -> bytes:
        """Wait for the next message. Raises :class:`RankLost` when rank 0 has gone."""

    def close(self) -> None:
        """Say that there are no more messages, or that none are read any more."""


class RingWriter:
    """The side of rank 0, with a connected socket for each reader."""

    def __init__(self, readers: list[socket.socket]) -> None:
        self.readers, self._sent, self._read = readers, 0, [0] * len(readers)
        handle = _memory()
        self._ring = mmap.mmap(handle, CHUNK * CHUNKS)
        for reader in readers:
            reader.settimeout(_WAIT)
            socket.send_fds(reader, [b"m"], [handle])
        os.close(handle)

    def send(self, message: bytes) -> None:
        """Send to all; waits only where a reader is a whole ring behind. Raises :class:`RankLost`."""
        whole, room = memoryview(message), CHUNK - _HEAD
        for at in range(0, len(whole), room):
            part, rest = whole[at : at + room], len(whole) - at
            for i, reader in enumerate(self.readers):
                while self._sent - self._read[i] >= CHUNKS:
                    self._read[i] += self._heard(i, reader)
            start = self._sent % CHUNKS * CHUNK
            self._ring[start : start + _HEAD] = rest.to_bytes(_HEAD, "little")
            self._ring[start + _HEAD : start + _HEAD + len(part)] = part
            self._sent += 1
            for i, reader in enumerate(self.readers):
                try:
                    reader.sendall(b".")
                except OSError as e:
                    raise RankLost(f"rank {i + 1} has gone: {e.strerror or e}") from e

    def _heard(self, i: int, reader: socket.socket) -> int:
        """How many chunks more a reader has read; waits for one."""
        try:
            if found := len(reader.recv(CHUNKS)):
                return found
            raise RankLost(f"rank {i + 1} has gone")
        except OSError as e:
            raise RankLost(f"rank {i + 1} takes no messages: {e.strerror or e}") from e

    def receive(self) -> bytes:
        """Rank 0 has nobody to hear from."""
        raise TypeError("rank 0 sends")

    def close(self) -> None:
        """End the messages, and wait until they are read: what a socket holds is lost when its other end closes."""
        for reader in self.readers:
            with contextlib.suppress(OSError), reader:
                reader.shutdown(socket.SHUT_WR)
                reader.settimeout(_CLOSE)
                while reader.recv(CHUNKS):
                    pass
        self._ring.close()


class RingReader:
    """The side of another rank, with its socket to rank 0."""

    def __init__(self, writer: socket.socket) -> None:
        self.writer, self._next = writer, 0
        _, handles, _, _ = socket.recv_fds(writer, 1, 1)
        if not handles:
            raise RankLost("rank 0 has gone")
        self._ring = mmap.mmap(handles[0], CHUNK * CHUNKS, access=mmap.ACCESS_READ)
        os.close(handles[0])

    def receive(self) -> bytes:
        """Wait for the next message. Raises :class:`RankLost` when rank 0 has gone, or has closed."""
        parts: list[bytes] = []
        while True:
            try:
                if not self.writer.recv(1):
                    raise RankLost("rank 0 has gone")
                start = self._next % CHUNKS * CHUNK
                rest = int.from_bytes(self._ring[start : start + _HEAD], "little")
                parts.append(self._ring[start + _HEAD : start + min(CHUNK, _HEAD + rest)])
                self._next += 1
                self.writer.send(b".")
            except OSError as e:
                raise RankLost(f"rank 0 has gone: {e.strerror or e}") from e
            if rest <= CHUNK - _HEAD:
                return b"".join(parts)

    def send(self, message: bytes) -> None:
        """Only rank 0 does."""
        raise TypeError("only rank 0 sends")

    def close(self) -> None:
        """Read no more."""
        self.writer.close()
        self._ring.close()


class Broadcast:
    """Between machines: the length, then the bytes, by gloo."""

    def __init__(self) -> None:
        # An idle server may wait for days.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def send(self, message: bytes) -> None:
        """Send to all. Raises :class:`RankLost`."""
        self._broadcast(torch.tensor([len(message)]))
        self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Wait for the next message. Raises :class:`RankLost`."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        return self._broadcast(torch.empty(int(size), dtype=torch.uint8)).numpy().tobytes()

    def _broadcast(self, t: torch.Tensor) -> torch.Tensor:
        try:
            dist.broadcast(t, 0, group=self._group)
        except RuntimeError as e:
            raise RankLost(f"a message did not reach all ranks: {e}") from e
        return t

    def close(self) -> None:
        """Nothing to do: the others see that this process ends."""


def connect() -> Channel:
    """The channel of this rank; all ranks call it at once."""
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        path, rank, ranks = [str(Path(folder) / "ring")], dist.get_rank(), dist.get_world_size()
        dist.broadcast_object_list(path)
        here = socket.socket(socket.AF_UNIX)
        if rank == 0:
            here.bind(path[0])
            here.listen(ranks)
        dist.barrier()
        joined: list[bool] = [True] * ranks
        dist.all_gather_object(joined, rank == 0 or _reaches(here, path[0], rank))
        if not all(joined):
            here.close()
            return Broadcast()
        if rank:
            return RingReader(here)
        with here:
            readers = dict(_accepted(here) for _ in range(ranks - 1))
        return RingWriter([readers[i] for i in range(1, ranks)])


def _reaches(own: socket.socket, path: str, rank: int) -> bool:
    """Connect to rank 0, if it is on this machine, and say who this is."""
    try:
        own.connect(path)
        own.sendall(rank.to_bytes(4, "little"))
    except OSError:
        return False
    return True


def _accepted(listener: socket.socket) -> tuple[int, socket.socket]:
    """A reader: its rank, and its socket."""
    one, _ = listener.accept()
    return int.from_bytes(one.recv(4, socket.MSG_WAITALL), "little"), one


def _memory() -> int:
    """A new file without a name, of the ring's size: in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("ridgeline-ring")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, CHUNK * CHUNKS)
    return handle
