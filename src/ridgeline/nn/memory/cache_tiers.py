"""Key/value caches that rest in host memory or on disk, with attention on the host (FlexGen, arXiv:2303.06865).

A cache on disk is one slab per token, keys and values together, [T, 2, B, G, D], so that what a step adds is one write,
and all that is stored is one read. The next cache of the disk is read while one computes; a single thread reads and
writes, so that nothing is read before it was written.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.nn.memory.layer_stream import OpenFile, aligned
from ridgeline.nn.memory.tiered_store import PAGE, check_folder, mark_host, scratch_file
from ridgeline.nn.model.attention import AttentionBackend, LayerCache
from ridgeline.nn.model.mask import Mask
from ridgeline.spec.errors import UserError


class HostCache(LayerCache):
    """A layer's keys and values in host memory, next to which attention is computed.

    What the prefill of an empty cache attends to is at hand on the device, and computed there.
    """

    def __init__(self, inner: LayerCache) -> None:
        self.inner = inner
        for value in vars(inner).values():
            if isinstance(value, Tensor):
                mark_host(value)

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that are stored."""
        return self.inner.length

    def attend(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Store ``k`` and ``v`` and let ``q`` [B, H, S, D] see all that is stored: [B, H, S, D]."""
        if not q.is_cuda:
            return self.inner.attend(backend, q, k, v, mask)
        if not self.inner.length:
            self.inner.append(k.cpu(), v.cpu())
            return backend.function(q, k, v, mask)
        return self.inner.attend(backend, q.cpu(), k.cpu(), v.cpu(), _on_cpu(mask)).to(q.device)


def _on_cpu(mask: Mask) -> Mask:
    values: dict[str, Any] = {k: v.cpu() for k, v in mask._asdict().items() if isinstance(v, Tensor)}
    return mask._replace(**values)


class CacheDisk:
    """The disk's caches of one generation, in the order in which they are used."""

    def __init__(self, folder: Path, ahead: bool = True) -> None:
        """``ahead``: whether the next cache is read while one computes."""
        self.folder, self._ahead = folder, ahead
        self.file: OpenFile | None = None
        self.read_bytes = self.written_bytes = 0
        self._caches: list[DiskCache] = []
        self._end = 0
        self._buffers: list[Tensor] = []
        self._coming: dict[DiskCache, tuple[int, Tensor, Future[None]]] = {}
        self._writes: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")

    def clear(self) -> None:
        """Begin another generation: what was stored is forgotten."""
        self.settle()
        for _, _, reading in self._coming.values():
            reading.result()
        self._coming, self._caches, self._buffers, self._end = {}, [], [], 0  # the next caches may be larger

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> DiskCache:
        """Another cache, used after those before it. Raises :class:`UserError` where the disk has no room."""
        made = DiskCache(self, shape, dtype, self._end)
        check_folder(self.folder, self._end + made.size)
        self.file = self.file or OpenFile(self.folder, *scratch_file(self.folder))
        self._end += made.size
        self._caches.append(made)
        return made

    def fetch(self, cache: DiskCache) -> Tensor:
        """The bytes of a cache so far; meanwhile the next one's begin to come."""
        if cache in self._coming and self._coming[cache][0] != cache.length:  # of another generation's length
            self._give_up(cache)
        if cache not in self._coming:
            self._start(cache)
        _, buffer, reading = self._coming.pop(cache)
        reading.result()
        following = self._caches[(self._caches.index(cache) + 1) % len(self._caches)]
        if self._ahead and following is not cache and following.length and following not in self._coming:
            self._start(following)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """A buffer that is no longer used."""
        self._buffers.append(buffer)

    def write(self, place: int, pages: Tensor) -> None:
        """Write whole pages behind."""

        def move() -> None:
            assert self.file is not None
            view, done = memoryview(pages.numpy()), 0  # type: ignore[arg-type]
            try:
                while done < len(view):
                    done += os.pwritev(self.file.descriptor, [view[done:]], place + done)
            except OSError as e:
                raise UserError(f"{self.folder}: {e.strerror} while the key/value cache was written there",
                                "give path=… a folder with more space") from None  # fmt: skip

        self.written_bytes += pages.numel()
        self._writes = [w for w in self._writes if not (w.done() and w.result() is None)]
        self._writes.append(self._thread.submit(move))

    def settle(self) -> None:
        """Wait for what is being written; raises what went wrong there."""
        writes, self._writes = self._writes, []
        for writing in writes:
            writing.result()

    def _start(self, cache: DiskCache) -> None:
        buffer = self._buffers.pop() if self._buffers else mark_host(aligned(max(c.size for c in self._caches)))
        length = cache.length

        def move() -> None:
            assert self.file is not None
            view, size = memoryview(buffer.numpy()), length * cache.slab  # type: ignore[arg-type]
            self.file.read(view[:size], cache.place, size)

        self.read_bytes += length * cache.slab
        self._coming[cache] = length, buffer, self._thread.submit(move)

    def _give_up(self, cache: DiskCache) -> None:
        _, buffer, reading = self._coming.pop(cache)
        reading.result()
        self._buffers.append(buffer)


class DiskCache(LayerCache):
    """A layer's keys and values on disk."""

    def __init__(self, disk: CacheDisk, shape: tuple[int, ...], dtype: torch.dtype, place: int) -> None:
        batch, groups, tokens, width = shape
        self.disk, self.shape, self.dtype, self.place = disk, shape, dtype, place
        self.length = 0
        self._used = batch * groups * width
        self.slab = -(-2 * self._used * dtype.itemsize // PAGE) * PAGE
        """Bytes of one token's keys and values of all sequences, in whole pages."""
        self.size = tokens * self.slab

    def _tokens(self, buffer: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens ``first`` to ``stop`` of a buffer: keys and values [B, G, S, D]."""
        batch, groups, _, width = self.shape
        rows = buffer[first * self.slab : stop * self.slab].view(stop - first, self.slab)
        used = rows[:, : 2 * self._used * self.dtype.itemsize].view(self.dtype)
        keys, values = used.view(stop - first, 2, batch, groups, width).permute(1, 2, 3, 0, 4)
        return keys, values

    def attend(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Store ``k`` and ``v`` and let ``q`` [B, H, S, D] see all that is stored: [B, H, S, D]."""
        start, end = self.length, self.length + k.shape[2]
        new = aligned((end - start) * self.slab)
        for t, place in zip((k, v), self._tokens(new, 0, end - start), strict=True):
            place.copy_(t)
        if not start:
            out = backend.function(q, k, v, mask)
        else:
            buffer = self.disk.fetch(self)
            buffer[start * self.slab : end * self.slab].copy_(new)
            keys, values = self._tokens(buffer, 0, end)
            out = backend.function(q.cpu(), keys, values, _on_cpu(mask)).to(q.device)
            self.disk.give_back(buffer)
        self.disk.write(self.place + start * self.slab, new)
        self.length = end
        return out
