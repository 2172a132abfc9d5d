"""Hidden states between layers that rest on the device, in host memory or on disk, a part of the batch at a time
(FlexGen, arXiv:2303.06865, section 4.1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.nn.memory.layer_stream import OpenFile, aligned
from ridgeline.nn.memory.tiered_store import PAGE, check_folder, mark_host, scratch_file
from ridgeline.spec.errors import UserError


class HiddenStates:
    """The hidden states of every part of the batch, [B / parts, S, H] each, wherever they rest."""

    def __init__(self, tiers: Sequence[str], folder: Path, device: torch.device, ahead: bool) -> None:
        """``tiers``: of each part; ``ahead``: whether the next part on disk is read while one computes."""
        self.tiers, self.device = list(tiers), device
        self.dtype = torch.float32
        self.disk = HiddenDisk(folder, [i for i, t in enumerate(tiers) if t == "disk"], device, ahead)
        self._held: dict[int, Tensor] = {}

    def __getitem__(self, part: int) -> Tensor:
        """A part's hidden states, on the device."""
        return self.disk.fetch(part) if self.tiers[part] == "disk" else self._held[part].to(self.device)

    def __setitem__(self, part: int, x: Tensor) -> None:
        """Let a part's hidden states rest where they belong."""
        self.dtype = x.dtype
        tier = self.tiers[part]
        if tier == "device":
            self._held[part] = x
        elif tier == "disk":
            self.disk.store(part, x)
        else:
            held = self._held.get(part)
            if held is None or held.shape != x.shape or held.dtype != x.dtype:
                pinned = x.is_cuda
                held = self._held[part] = mark_host(torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned))
            held.copy_(x)

    def clear(self) -> None:
        """Forget what is on the device: the pass is over. Raises what went wrong in writing."""
        self._held = {i: t for i, t in self._held.items() if self.tiers[i] == "host"}
        self.disk.settle()


class HiddenDisk:
    """One slab of an unlinked file for each part; a single thread reads and writes, so that nothing is read before it
    was written."""

    def __init__(self, folder: Path, parts: Sequence[int], device: torch.device, ahead: bool) -> None:
        self.folder, self.parts, self.device, self._ahead = folder, list(parts), device, ahead
        self.read_bytes = self.written_bytes = 0
        self._file: OpenFile | None = None
        self._slab = 0
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._free: list[Tensor] = []
        self._coming: dict[int, tuple[Tensor, Future[None]]] = {}
        self._writes: list[tuple[Tensor, Future[None]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hidden")

    def store(self, part: int, x: Tensor) -> None:
        """Write a part behind. Raises :class:`UserError` where the disk has no room."""
        size = x.numel() * x.element_size()
        if size > self._slab:
            self._grow(-(-size // PAGE) * PAGE)
        self._shape, self._dtype = tuple(x.shape), x.dtype
        self._reclaim()
        if part in self._coming:  # read ahead in a pass that was broken off, or that is over
            stale, reading = self._coming.pop(part)
            reading.result()
            self._free.append(stale)
        page = self._free.pop() if self._free else mark_host(aligned(self._slab))
        page[:size].view(x.dtype).view(x.shape).copy_(x)
        place, length = self.parts.index(part) * self._slab, -(-size // PAGE) * PAGE

        def move() -> None:
            assert self._file is not None
            view, done = memoryview(page.numpy())[:length], 0  # type: ignore[arg-type]
            try:
                while done < length:
                    done += os.pwritev(self._file.descriptor, [view[done:]], place + done)
            except OSError as e:
                raise UserError(f"{self.folder}: {e.strerror} while hidden states were written there",
                                "give path=… a folder with more space") from None  # fmt: skip

        self.written_bytes += length
        self._writes.append((page, self._thread.submit(move)))

    def fetch(self, part: int) -> Tensor:
        """A part as it was stored, on the device; meanwhile the next one begins to come."""
        if part not in self._coming:
            self._start(part)
        page, reading = self._coming.pop(part)
        reading.result()
        following = self.parts[(self.parts.index(part) + 1) % len(self.parts)]
        if self._ahead and following != part:
            self._start(following)
        size = torch.Size(self._shape).numel() * self._dtype.itemsize
        found = page[:size].view(self._dtype).view(self._shape).to(self.device, copy=True)
        self._free.append(page)
        return found

    def settle(self) -> None:
        """Wait for what is being written; raises what went wrong there."""
        for _, writing in self._writes:
            writing.result()
        self._reclaim()

    def _start(self, part: int) -> None:
        self._reclaim()
        page = self._free.pop() if self._free else mark_host(aligned(self._slab))
        size = torch.Size(self._shape).numel() * self._dtype.itemsize
        length, place = -(-size // PAGE) * PAGE, self.parts.index(part) * self._slab

        def move() -> None:
            assert self._file is not None
            self._file.read(memoryview(page.numpy())[:length], place, length)  # type: ignore[arg-type]

        self.read_bytes += length
        self._coming[part] = page, self._thread.submit(move)

    def _reclaim(self) -> None:
        """Take back the buffers of what was written; raises what went wrong there."""
        done = [(page, writing) for page, writing in self._writes if writing.done()]
        self._writes = [w for w in self._writes if not w[1].done()]
        for page, writing in done:
            writing.result()
            self._free.append(page)

    def _grow(self, slab: int) -> None:
        """Make room for larger slabs; nothing of this pass is stored yet."""
        self.settle()
        for _, reading in self._coming.values():
            reading.result()
        check_folder(self.folder, slab * len(self.parts))
        self._file = self._file or OpenFile(self.folder, *scratch_file(self.folder))
        self._slab, self._free, self._coming = slab, [], {}
