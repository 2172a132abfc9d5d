"""The tiered store: tensors that are kept in host memory or on disk while the device works without them.

An entry is a list of tensors under a string key, transferred together. ``put`` creates it, ``get`` copies it into
tensors of the device, ``send`` copies tensors of the device into it, ``prefetch`` starts reading it, ``drop`` removes
it. Work on the host happens between ``open`` and ``close``. Every transfer is counted by direction: d2h, h2d,
disk_read, disk_write.

The disk tier is one unlinked file, so that nothing is left behind however the process ends. It is read and written
bypassing the page cache (O_DIRECT, aligned buffers) by a pool of threads: prefetched reads, write-behind. If the file
system does not support O_DIRECT, ordinary reads and writes are followed by ``posix_fadvise``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ridgeline.spec.errors import UserError

Tier = Literal["cpu", "disk"]
DIRECTIONS = ("d2h", "h2d", "disk_read", "disk_write")
PAGE = 4096
"""Alignment in bytes of offsets, lengths and addresses for O_DIRECT."""
_ALIGN = 64
_THREADS = 2


# ---- what is host memory, on machines whose device is the CPU as well -----------------------------------------------

HOST = "host"
"""Category of host memory, which is not the device's."""
_host: dict[int, Any] = {}
_here = threading.local()


def mark_host(t: Tensor) -> Tensor:
    """Mark the storage of ``t`` as host memory, not the device's; returns ``t``."""
    storage = t.untyped_storage()
    key = storage._cdata
    _host[key] = weakref.ref(storage, lambda _: _host.pop(key, None))
    return t


def is_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage was marked as host memory."""
    found = _host.get(storage._cdata)
    return found is not None and found() is not None


@contextlib.contextmanager
def making(category: str) -> Iterator[None]:
    """Context in which tensors created by this thread count as ``category`` in the meter."""
    before = making_now()
    _here.category = category
    try:
        yield
    finally:
        _here.category = before


def on_host() -> contextlib.AbstractContextManager[None]:
    """Context in which tensors created by this thread are host memory."""
    return making(HOST)


def making_now() -> str | None:
    """The category set by this thread's :func:`making`; None: none."""
    return getattr(_here, "category", None)


# ---- the store ------------------------------------------------------------------------------------------------------


@dataclass
class StoreTraffic:
    """Transfers in one direction: payload bytes, number of transfers, and the seconds that they took."""

    bytes: int = 0
    count: int = 0
    seconds: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second while transferring; 0 if nothing was transferred."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class _Entry:
    tier: Tier
    host: list[Tensor]
    """Host tensors; those of the disk tier have memory only while they are open."""
    offsets: list[int]
    """Offset of each tensor within the entry, in bytes."""
    length: int
    """Bytes on disk, in whole pages."""
    payload: int
    place: int = -1
    """Offset in the file."""
    reading: Future[Tensor] | None = None
    writing: Future[None] | None = None
    resident: bool = True


@dataclass
class TieredStore:
    """Entries in host memory or on disk for one rank.

    ``folder`` is where the disk tier's file goes and ``capacity`` the bytes it may need; both are checked at once.
    Raises :class:`UserError` when the folder cannot be written or has too little space. On the meta device entries are
    shapes only, and the disk is left alone.
    """

    device: torch.device
    folder: Path | None = None
    capacity: int = 0
    traffic: dict[str, StoreTraffic] = field(default_factory=lambda: {d: StoreTraffic() for d in DIRECTIONS})
    direct: bool = True
    """Whether the disk tier bypasses the page cache."""
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _file: int = -1
    _end: int = 0
    _free: dict[int, list[Tensor]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.folder is not None and self.device.type != "meta":
            check_folder(self.folder, self.capacity)
            self._file, self.direct = scratch_file(self.folder)
            if self.capacity:
                self._reserve(self.capacity)
            weakref.finalize(self, os.close, self._file)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # ---- entries ----

    def put(self, key: str, tensors: Sequence[Tensor], tier: Tier) -> list[Tensor]:
        """Create an entry from copies of ``tensors``; returns its host tensors (without memory if on disk)."""
        self.drop(key)
        if self.device.type == "meta":
            tier = "cpu"
        with on_host(), torch.no_grad():
            host = [self._like(t) for t in tensors]
        offsets, at = [], 0
        for t in tensors:
            offsets.append(at)
            at += -(-t.nbytes // _ALIGN) * _ALIGN
        entry = _Entry(tier, host, offsets, -(-at // PAGE) * PAGE, sum(t.nbytes for t in tensors))
        self._entries[key] = entry
        if tier == "disk":
            if self._file < 0:
                raise ValueError("this store has no disk tier")
            entry.place, self._end = self._end, self._end + entry.length
        self._copy(entry.host, tensors)
        self.close(key)
        return host

    def _like(self, t: Tensor) -> Tensor:
        pin = self._stream is not None
        place = "meta" if self.device.type == "meta" else "cpu"
        return mark_host(torch.empty(t.shape, dtype=t.dtype, device=place, pin_memory=pin))

    def drop(self, key: str) -> None:
        """Remove an entry; its disk space is not reused."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._settle(entry)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def size(self, tier: Tier) -> int:
        """Payload bytes of all entries of a tier."""
        return sum(e.payload for e in self._entries.values() if e.tier == tier)

    def tensors(self) -> list[Tensor]:
        """All host memory that is held at rest."""
        with self._lock:
            free = [t for buffers in self._free.values() for t in buffers]
        return [t for e in self._entries.values() for t in e.host] + free

    def prefetch(self, key: str) -> None:
        """Start reading an entry of the disk tier; no-op for one in memory."""
        entry = self._entries[key]
        if entry.tier == "disk" and entry.reading is None and not entry.resident:
            entry.reading = self._pool.submit(self._read, entry)

    def get(self, key: str, into: Sequence[Tensor]) -> Callable[[], None]:
        """Copy an entry into tensors of the device, of the same shapes; returns a function that waits for the copy."""
        entry = self._entries[key]
        staging = None
        source = entry.host
        if entry.tier == "disk" and not entry.resident:
            staging = self._arrived(entry)
            source = _views(staging, entry)
        self._count("h2d", entry.payload, lambda: self._copy(into, source))
        done = None if self._stream is None else self._stream.record_event()
        if staging is not None:
            if done is not None:
                done.synchronize()  # the buffer is used again
            self._give_back(staging)
        # The host waits, as whoever reads next may do so on a stream that we don't know (FSDP's).
        return done.synchronize if done is not None else lambda: None

    def send(
        self, key: str, tensors: Sequence[Tensor], add: bool = False, wire: torch.dtype | None = None
    ) -> list[Tensor] | None:
        """Copy (or ``add``) floating-point tensors of the device into an entry; ``wire``: the dtype of the transfer.

        Returns the 2-norm of each of its tensors afterwards; None for an entry in host memory, where they can be
        computed after :meth:`sync` without reading it again.
        """
        entry = self._entries[key]
        host = self.open(key, fill=add)
        if add or wire is not None:
            tensors = [t if wire is None else t.to(wire) for t in tensors]
            with on_host(), torch.no_grad():
                arrived = [self._like(t) for t in tensors]
            self._count("d2h", sum(t.nbytes for t in tensors), lambda: self._copy(arrived, tensors))
            if add:
                torch._foreach_add_(host, arrived)
            else:
                torch._foreach_copy_(host, arrived)
        else:
            self._count("d2h", entry.payload, lambda: self._copy(host, tensors, wait=entry.tier == "disk"))
        if entry.tier == "cpu":
            return None
        with on_host():
            norms = list(torch._foreach_norm(host))
        self.close(key)
        return norms

    def open(self, key: str, fill: bool = True) -> list[Tensor]:
        """The entry's host tensors, with memory; read from disk unless they are to be overwritten."""
        entry = self._entries[key]
        if entry.resident:
            return entry.host
        for t in entry.host:
            t.untyped_storage().resize_(t.nbytes)
        entry.resident = True
        if fill:
            staging = self._arrived(entry)
            torch._foreach_copy_(entry.host, _views(staging, entry))
            self._give_back(staging)
        else:
            self._settle(entry)
        return entry.host

    def close(self, key: str, changed: bool = True) -> None:
        """Release an open entry of the disk tier, which is written behind if it ``changed``."""
        entry = self._entries[key]
        if entry.tier == "cpu" or not entry.resident:
            return
        if changed:
            staging = self._staging(entry.length)
            torch._foreach_copy_(_views(staging, entry), entry.host)
            self._settle(entry)
            entry.writing = self._pool.submit(self._write, entry, staging)
        for t in entry.host:
            t.untyped_storage().resize_(0)
        entry.resident = False

    def sync(self) -> None:
        """Wait for pending copies from the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def finish(self) -> None:
        """Wait for pending reads and writes; raises their exceptions."""
        self.sync()
        for entry in self._entries.values():
            self._settle(entry)

    def copy(self, direction: str, into: Sequence[Tensor], source: Sequence[Tensor]) -> Callable[[], None]:
        """Copy tensors between device and host memory outside the store's entries, and count it.

        The returned function makes the current stream wait for the copy.
        """
        self._count(direction, sum(t.nbytes for t in source), lambda: self._copy(into, source, wait=False))
        done = None if self._stream is None else self._stream.record_event()
        return lambda: None if done is None else torch.cuda.current_stream(self.device).wait_event(done)

    # ---- moving ----

    def _copy(self, into: Sequence[Tensor], source: Sequence[Tensor], wait: bool = True) -> None:
        """``wait``: until what goes to the host is there."""
        into, source = list(into), list(source)
        if not into:
            return
        with torch.no_grad():
            if self._stream is None:
                torch._foreach_copy_(into, source)
                return
            # On a stream of its own, so that what is queued meanwhile by other threads does not wait in front of it.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(into, source, non_blocking=True)
            for t in (*into, *source):
                if t.is_cuda:
                    t.record_stream(self._stream)
            if wait and any(not t.is_cuda for t in into):
                self._stream.synchronize()

    def _count(self, direction: str, size: int, move: Any) -> None:
        began = time.perf_counter()
        move()
        took = time.perf_counter() - began
        with self._lock:
            t = self.traffic[direction]
            t.bytes, t.count, t.seconds = t.bytes + size, t.count + 1, t.seconds + took

    def _arrived(self, entry: _Entry) -> Tensor:
        reading = entry.reading or self._pool.submit(self._read, entry)
        entry.reading = None
        return reading.result()

    def _settle(self, entry: _Entry) -> None:
        """Wait for the pending write, and discard a read that was not used."""
        if entry.reading is not None:
            self._give_back(entry.reading.result())
            entry.reading = None
        if entry.writing is not None:
            entry.writing.result()
            entry.writing = None

    def _read(self, entry: _Entry) -> Tensor:
        if entry.writing is not None:
            entry.writing.result()
        staging = self._staging(entry.length)

        def move() -> None:
            _whole(os.preadv, self._file, staging, entry.place)
            self._forget(entry)

        self._count("disk_read", entry.payload, move)
        return staging

    def _write(self, entry: _Entry, staging: Tensor) -> None:
        def move() -> None:
            _whole(os.pwritev, self._file, staging, entry.place)
            if not self.direct:
                os.fdatasync(self._file)
            self._forget(entry)

        self._count("disk_write", entry.payload, move)
        self._give_back(staging)

    def _forget(self, entry: _Entry) -> None:
        """Without O_DIRECT: ask the kernel to drop its copies."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, entry.place, entry.length, os.POSIX_FADV_DONTNEED)

    def _staging(self, length: int) -> Tensor:
        """A page-aligned host buffer of ``length`` bytes, one that is free if there is."""
        with self._lock:
            free = self._free.get(length)
            if free:
                return free.pop()
        raw = torch.empty(length + PAGE, dtype=torch.uint8, pin_memory=self._stream is not None)
        mark_host(raw)
        start = -raw.data_ptr() % PAGE
        return raw[start : start + length]

    def _give_back(self, staging: Tensor) -> None:
        with self._lock:
            free = self._free.setdefault(staging.numel(), [])
            if len(free) < _THREADS:
                free.append(staging)

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file, 0, -(-size // PAGE) * PAGE)
        except OSError as e:
            if e.errno == errno.ENOSPC:
                assert self.folder is not None
                raise _too_small(self.folder, size) from None
            # Not every file system can reserve: writing will tell.


def _views(staging: Tensor, entry: _Entry) -> list[Tensor]:
    """The entry's tensors as views of its bytes."""
    return [
        staging[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for at, t in zip(entry.offsets, entry.host, strict=True)
    ]


def _whole(call: Any, file: int, staging: Tensor, place: int) -> None:
    view = memoryview(staging.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        n = call(file, [view[done:]], place + done)
        if n <= 0:
            raise OSError(errno.EIO, f"only {done} of {len(view)} bytes")
        done += n


def scratch_file(folder: Path) -> tuple[int, bool]:
    """A new unlinked file, and whether it takes O_DIRECT."""
    fd, name = tempfile.mkstemp(prefix="store-", dir=folder)
    try:
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
                os.close(fd)
                return descriptor, True
        return fd, False
    finally:
        os.unlink(name)


def check_folder(folder: Path, need: int) -> None:
    """Raise :class:`UserError` unless ``need`` bytes can be written to ``folder`` (created if it does not exist)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * PAGE)
    except OSError as e:
        raise UserError(
            f"offload path {folder} cannot be written ({e.strerror or e}); {_size(need)} must go there",
            "give path=… a folder on a disk of yours with that much space, or offload to cpu",
        ) from None
    if shutil.disk_usage(folder).free < need:
        raise _too_small(folder, need)


def _too_small(folder: Path, need: int) -> UserError:
    free = shutil.disk_usage(folder).free
    return UserError(
        f"offload path {folder} has {_size(free)} free, {_size(need)} are needed",
        f"free {_size(need - free)} there, give path=… a larger disk, or offload to cpu",
    )


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB ({n} bytes)" if n >= 1e7 else f"{n} bytes"
