"""Cache blocks that the pool has no room for: in host memory, and from there on disk.

A block is known by the chained hash of the tokens up to its end. The host keeps the last used ones within its bytes;
what it drops goes to one file per block, written under another name first and renamed, so that a crash leaves no half
file. A file holds a magic number, the fingerprint of model and pool, a checksum of each layer's part, and these parts;
what does not agree is not there. A ``persistent`` store leaves its files for the next start.

Blocks come back layer by layer: all blocks' parts of layer i + 1 are read while layer i computes (FlexGen's overlap,
arXiv:2303.06865, at the grain of a serving step). That a part is damaged may therefore turn out in the middle of a
pass; the sequences that hold it must then be computed again (:meth:`Restoring.finish`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ridgeline.nn.memory.tiered_store import check_folder, mark_host

_MAGIC = b"RLKV0002"
"""Of files with a checksum for each layer; those of earlier versions are not read."""
_THREADS = 4


@dataclass
class _Coming:
    """A block on its way into the pool."""

    key: bytes
    block: int
    host: Tensor | None
    """Its bytes, if they are in host memory."""
    keep: Tensor | None = None
    """Where what is read stays, if host memory keeps it."""
    writing: Future[None] | None = None
    """Its file, if that is still being written."""


class Restoring:
    """Blocks on their way into the pool, layer by layer, in the order in which a pass needs them."""

    def __init__(self, store: BlockStore, coming: list[_Coming]) -> None:
        self._store, self._coming = store, coming
        self._lost: set[bytes] = set()
        share = -(-len(coming) // _THREADS)
        shares = [coming[i : i + share] for i in range(0, len(coming), share)]
        if store.stream is not None:  # the blocks may still be read by what was launched before
            store.stream.wait_stream(torch.cuda.current_stream())
        bring = store.thread.submit
        self._layers: list[list[Future[Any]]] = [
            [bring(store.bring, some, layer, self._lost) for some in shares] for layer in range(store.layers)
        ]
        self._waited = 0
        self._done = False

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def wait(self, layer: int) -> None:
        """Return when the pool has ``layer`` (on a GPU: when the current stream will), and all before it."""
        while self._waited <= layer < self.layers:
            for part in self._layers[self._waited]:
                event = part.result()
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
            self._waited += 1

    def finish(self) -> set[int]:
        """Wait for all layers → the pool's blocks whose contents could not be brought: gone, short or damaged."""
        self.wait(self.layers - 1)
        if not self._done:
            self._done = True
            self._store.end(self._coming, self._lost)
        return {c.block for c in self._coming if c.key in self._lost}


class BlockStore:
    """Blocks of the pool's tensors, [1, G, slots, ·] each, by key."""

    def __init__(
        self, pool: Sequence[Sequence[Tensor]], block_size: int, fingerprint: str, host_bytes: int, disk_bytes: int = 0,
        folder: Path | None = None, persistent: bool = False,
    ) -> None:  # fmt: skip
        """``pool``: the tensors of each layer. Raises :class:`UserError` when the folder cannot be written or has too
        little space."""
        self._size = block_size
        self._parts: list[list[tuple[Tensor, int, int]]] = []
        self._spans: list[tuple[int, int]] = []
        at = 0
        for tensors in pool:
            start, parts = at, []
            for t in tensors:
                length = t[:, :, :block_size].numel() * t.element_size()
                parts.append((t, at, length))
                at += -(-length // 16) * 16
            self._parts.append(parts)
            self._spans.append((start, at))
        self.layers = len(self._parts)
        self.block_bytes = at
        self._header = len(_MAGIC) + 32 + 4 * self.layers
        self._pinned = pool[0][0].is_cuda
        self.stream = torch.cuda.Stream(pool[0][0].device) if self._pinned else None
        self._mark = hashlib.sha256(f"{fingerprint}/{at}/{block_size}".encode()).digest()
        self._host: OrderedDict[bytes, Tensor] = OrderedDict()
        self._most_host = host_bytes // at
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._folder = folder if disk_bytes >= at else None
        self._most_files = disk_bytes // at
        self.persistent = persistent
        self.saved = self.restored = 0
        """Blocks taken from the pool, and brought back."""
        self.thread = ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks")
        self._writing: dict[bytes, Future[None]] = {}
        if self._folder is not None:
            self._open(self._folder)

    # ---- what is there -------------------------------------------------------------------------------------------

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there without a gap; these count as used."""
        for i, key in enumerate(keys):
            if key in self._host:
                self._host.move_to_end(key)
            elif key in self._files:
                self._files.move_to_end(key)
            else:
                return i
        return len(keys)

    def save(self, key: bytes, block: int) -> None:
        """Keep what block ``block`` of the pool holds."""
        if key in self._host:
            self._host.move_to_end(key)
            return
        if key in self._files or not (self._most_host or self._folder):
            return
        flat = self._buffer(self.block_bytes)
        for layer in range(self.layers):
            for t, view in self._views(flat, block, layer):
                view.copy_(t)
        self.saved += 1
        self._host[key] = flat
        self._shrink()

    def restore(self, keys: Iterable[bytes], blocks: Iterable[int]) -> Restoring:
        """Begin to bring the blocks of ``keys`` into the pool's ``blocks``, which nothing may touch until that ends."""
        coming = []
        for key, block in zip(keys, blocks, strict=True):
            coming.append(_Coming(key, block, self._host.get(key), writing=self._writing.get(key)))
        for c in [c for c in coming if c.host is None][-self._most_host :] if self._most_host else ():
            c.keep = self._buffer(self.block_bytes)
        return Restoring(self, coming)

    def close(self) -> None:
        """Write what the host holds, for the next start; or leave no file."""
        if self.persistent and self._folder is not None:
            self._most_host = 0
            self._shrink()
        self._host.clear()
        for writing in list(self._writing.values()):
            writing.result()
        self.thread.shutdown()
        if not self.persistent and self._folder is not None:
            for key in self._files:
                self._path(key).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another server's blocks
                self._folder.rmdir()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _buffer(self, size: int) -> Tensor:
        return mark_host(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))

    def _views(self, flat: Tensor, block: int, layer: int, at: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The pool's part of a block in a layer beside its place in ``flat``, which begins with byte ``at``."""
        slots = slice(block * self._size, (block + 1) * self._size)
        found = []
        for t, start, length in self._parts[layer]:
            part = t[:, :, slots]
            found.append((part, flat[start - at : start - at + length].view(t.dtype).view(part.shape)))
        return found

    def bring(self, coming: list[_Coming], layer: int, lost: set[bytes]) -> Any:
        """Bring one layer of some blocks into the pool; in a thread → an event behind it, on a GPU."""
        start, stop = self._spans[layer]
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for c in coming:
                if c.key in lost:
                    continue
                flat, at = c.host if c.host is not None else c.keep, 0
                if flat is None:
                    flat, at = self._buffer(stop - start), start
                if c.host is None and not self._read(c, layer, flat[start - at : stop - at]):
                    lost.add(c.key)
                    continue
                for t, view in self._views(flat, c.block, layer, at):
                    t.copy_(view, non_blocking=True)
            return self.stream.record_event() if self.stream is not None else None

    def end(self, coming: list[_Coming], lost: set[bytes]) -> None:
        """Take in that blocks have come, all but the ``lost`` ones."""
        for c in coming:
            if c.key in lost:
                if c.key in self._files:
                    del self._files[c.key]
                    self._path(c.key).unlink(missing_ok=True)
                continue
            self.restored += 1
            if c.keep is not None and c.key not in self._host:
                self._host[c.key] = c.keep
        self._shrink()

    def _shrink(self) -> None:
        while len(self._host) > self._most_host:
            key, flat = self._host.popitem(last=False)
            if self._folder is not None and key not in self._files:
                self._files[key] = None
                self._writing[key] = self.thread.submit(self._write, key, flat)
        while len(self._files) > self._most_files:
            key, _ = self._files.popitem(last=False)
            if (writing := self._writing.pop(key, None)) is not None:
                writing.result()
            self._path(key).unlink(missing_ok=True)
        self._writing = {k: w for k, w in self._writing.items() if not w.done()}

    def _open(self, folder: Path) -> None:
        check_folder(folder, self.block_bytes)
        for file in folder.glob("*.tmp"):  # of processes that died while they wrote
            pid = file.name.split(".")[1]
            if not (pid.isdigit() and psutil.pid_exists(int(pid))):
                file.unlink(missing_ok=True)
        if self.persistent:
            for file in sorted(folder.glob("*.kv"), key=lambda f: f.stat().st_mtime):
                with contextlib.suppress(ValueError, OSError), file.open("rb") as f:
                    if f.read(len(_MAGIC) + 32) == _MAGIC + self._mark:
                        self._files[bytes.fromhex(file.stem)] = None
            self._shrink()

    def _path(self, key: bytes) -> Path:
        assert self._folder is not None
        return self._folder / f"{key.hex()}.kv"

    def _write(self, key: bytes, flat: Tensor) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        try:
            with unfinished.open("wb") as f:
                f.write(_MAGIC + self._mark)
                for start, stop in self._spans:
                    f.write(zlib.crc32(data[start:stop]).to_bytes(4, "little"))
                f.write(data)
            unfinished.replace(path)
        except OSError:  # a full disk: the block will be computed again
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _read(self, c: _Coming, layer: int, into: Tensor) -> bool:
        """Read one layer's part of a block from disk → whether it is there, and whole."""
        if c.writing is not None:
            c.writing.result()
        data, header = memoryview(into.numpy()), memoryview(bytearray(self._header))  # type: ignore[arg-type]
        try:
            with self._path(c.key).open("rb", buffering=0) as f:
                whole = _fill(f.fileno(), header, 0)
                whole = whole and _fill(f.fileno(), data, self._header + self._spans[layer][0])
        except OSError:
            return False
        known, sums = header[: len(_MAGIC) + 32], header[len(_MAGIC) + 32 :]
        right = zlib.crc32(data).to_bytes(4, "little") == sums[4 * layer : 4 * layer + 4]
        return whole and known == _MAGIC + self._mark and right


def _fill(descriptor: int, into: memoryview, at: int) -> bool:
    """Read a file from byte ``at`` on, in as many reads as that takes → whether it has as many bytes."""
    done = 0
    while done < len(into):
        n = os.preadv(descriptor, [into[done:]], at + done)
        if n <= 0:
            return False
        done += n
    return True
