"""Cache blocks that the pool has no room for: in host memory, and from there on disk.

A block is known by the chained hash of the tokens up to its end. The host keeps the last used ones within its bytes;
what it drops goes to one file per block, written under another name first and renamed, so that a crash leaves no half
file. A file holds a magic number, the fingerprint of model and pool, a checksum and the block; what does not agree is
not there. A ``persistent`` store leaves its files for the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ridgeline.nn.memory.tiered_store import check_folder, mark_host

_MAGIC = b"RLKV0001"
_HEADER = len(_MAGIC) + 32 + 4
_THREADS = 4


class BlockStore:
    """Blocks of the pool's tensors, [1, G, slots, ·] each, by key."""

    def __init__(
        self, tensors: Sequence[Tensor], block_size: int, fingerprint: str, host_bytes: int, disk_bytes: int = 0,
        folder: Path | None = None, persistent: bool = False,
    ) -> None:  # fmt: skip
        """Raises :class:`UserError` when the folder cannot be written or has too little space."""
        self._size = block_size
        self._parts: list[tuple[Tensor, int, int]] = []
        at = 0
        for t in tensors:
            length = t[:, :, :block_size].numel() * t.element_size()
            self._parts.append((t, at, length))
            at += -(-length // 16) * 16
        self.block_bytes = at
        self._pinned = tensors[0].is_cuda
        self._mark = hashlib.sha256(f"{fingerprint}/{at}/{block_size}".encode()).digest()
        self._host: OrderedDict[bytes, Tensor] = OrderedDict()
        self._most_host = host_bytes // at
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._folder = folder if disk_bytes >= at else None
        self._most_files = disk_bytes // at
        self.persistent = persistent
        self.saved = self.restored = 0
        """Blocks taken from the pool, and brought back."""
        self._thread = ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks")
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
        flat = mark_host(torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        for t, view in self._views(flat, block):
            view.copy_(t)
        self.saved += 1
        self._host[key] = flat
        self._shrink()

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Bring the blocks of ``keys`` into the pool's ``blocks`` → how many, without a gap: a file may be damaged."""
        reads = {key: self._thread.submit(self._read, key) for key in keys if key not in self._host}
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            flat = self._host.get(key)
            if flat is None:
                flat = reads[key].result()
                if flat is None:
                    self._files.pop(key, None)
                    return i
                if self._most_host:
                    self._host[key] = flat
            for t, view in self._views(flat, block):
                t.copy_(view)
            self.restored += 1
        self._shrink()
        return len(keys)

    def close(self) -> None:
        """Write what the host holds, for the next start; or leave no file."""
        if self.persistent and self._folder is not None:
            self._most_host = 0
            self._shrink()
        self._host.clear()
        for writing in list(self._writing.values()):
            writing.result()
        self._thread.shutdown()
        if not self.persistent and self._folder is not None:
            for key in self._files:
                self._path(key).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another server's blocks
                self._folder.rmdir()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _views(self, flat: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
        """The pool's part of a block beside its place in the block's bytes."""
        slots = slice(block * self._size, (block + 1) * self._size)
        found = []
        for t, at, length in self._parts:
            part = t[:, :, slots]
            found.append((part, flat[at : at + length].view(t.dtype).view(part.shape)))
        return found

    def _shrink(self) -> None:
        while len(self._host) > self._most_host:
            key, flat = self._host.popitem(last=False)
            if self._folder is not None and key not in self._files:
                self._files[key] = None
                self._writing[key] = self._thread.submit(self._write, key, flat)
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
                f.write(_MAGIC + self._mark + zlib.crc32(data).to_bytes(4, "little"))
                f.write(data)
            unfinished.replace(path)
        except OSError:  # a full disk: the block will be computed again
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _read(self, key: bytes) -> Tensor | None:
        """A block from disk; None where it is not there, or not whole."""
        if (writing := self._writing.get(key)) is not None:
            writing.result()
        flat = mark_host(torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        try:
            with self._path(key).open("rb") as f:
                header = f.read(_HEADER)
                whole = f.readinto(data) == len(data)
        except OSError:
            return None
        right = header == _MAGIC + self._mark + zlib.crc32(data).to_bytes(4, "little")
        return flat if whole and right else None
