"""Layers whose weights are stored in host memory or on disk and are on the device only while they are used
(ZeRO-Inference, arXiv:2207.00032, section 6).

While one layer computes, a thread fetches the next ones into device memory that they use in turn (from host memory to a
CPU, which has no other cores for it, each is copied when its layer begins). Weights on disk are read with O_DIRECT,
bypassing the page cache: directly into that memory if the device is the CPU, through pinned memory if it is a GPU.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.tiered_store import PAGE, check_folder, mark_host, scratch_file
from ridgeline.spec.errors import UserError
from ridgeline.spec.ring import RingSpace

_ALIGN = 64


@dataclass
class LayerTensor:
    """One parameter or buffer of a layer, and its location in the layer's bytes."""

    owner: nn.Module
    name: str
    """Dotted name within the layer."""
    dtype: torch.dtype
    shape: torch.Size
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor within its layer's bytes, uint8 [size]."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.shape)

    def bind(self, t: Tensor) -> None:
        """Make the module compute with ``t``."""
        leaf = self.name.rpartition(".")[2]
        held = self.owner._parameters.get(leaf)
        if held is not None:
            held.data = t
        else:
            self.owner._buffers[leaf] = t

    def unbind(self, device: torch.device) -> None:
        """Keep the shape, free the memory. A layer that is used out of order computes NaN."""
        empty = torch.full((), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype, device=device)
        leaf = self.name.rpartition(".")[2]
        held = self.owner._parameters.get(leaf)
        if held is not None and held.is_meta:  # memory cannot be given to a parameter of the meta device
            self.owner._parameters[leaf] = nn.Parameter(empty.expand(self.shape), requires_grad=False)
        else:
            self.bind(empty.expand(self.shape))


def layer_tensors(layer: nn.Module) -> list[LayerTensor]:
    """All parameters and buffers of a layer, packed consecutively."""
    found: list[LayerTensor] = []
    seen: set[int] = set()
    at = 0
    for path, module in layer.named_modules():
        for name, t in chain(module._parameters.items(), module._buffers.items()):
            if t is None or id(t) in seen:
                continue
            seen.add(id(t))
            found.append(LayerTensor(module, f"{path}.{name}" if path else name, t.dtype, t.shape, at))
            at += -(-found[-1].nbytes // _ALIGN) * _ALIGN
    return found


def size_of(tensors: Sequence[LayerTensor]) -> int:
    """Bytes of a layer whose tensors are packed consecutively."""
    last = tensors[-1]
    return last.offset + -(-last.nbytes // _ALIGN) * _ALIGN


class Source(Protocol):
    """Storage of one layer's bytes."""

    @property
    def size(self) -> int:
        """Bytes of a buffer that holds them."""

    def read(self, into: Tensor) -> None:
        """Fill ``into``, page-aligned host memory of at least ``size`` bytes; blocks. Raises :class:`UserError`."""


@dataclass
class HostSource:
    """A layer in host memory."""

    flat: Tensor
    """uint8 [size]; pinned where the device is a GPU."""

    @property
    def size(self) -> int:
        """Bytes of the layer."""
        return self.flat.numel()

    def read(self, into: Tensor) -> None:
        """Copy the layer."""
        into[: self.size].copy_(self.flat)


@dataclass(frozen=True)
class FileRange:
    """Whole pages of a file and their offset in the buffer; the file may end within the last page."""

    file: OpenFile
    start: int
    length: int
    needed: int
    """Number of bytes that must exist."""
    place: int


@dataclass
class FileSource:
    """A layer on disk."""

    ranges: list[FileRange]

    @property
    def size(self) -> int:
        """Bytes of a buffer that holds all ranges."""
        return max(r.place + r.length for r in self.ranges)

    def read(self, into: Tensor) -> None:
        """Read all ranges into place."""
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        for r in self.ranges:
            r.file.read(view[r.place : r.place + r.length], r.start, r.needed)


class OpenFile:
    """A file that is read bypassing the page cache."""

    def __init__(self, path: Path, descriptor: int, direct: bool) -> None:
        self.path, self.descriptor, self.direct = path, descriptor, direct
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, path: Path) -> OpenFile:
        """Open ``path``. Raises :class:`UserError` if that fails."""
        try:
            if hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECT), True)
            return cls(path, os.open(path, os.O_RDONLY), False)
        except OSError as e:
            raise UserError(f"{path} cannot be opened: {e.strerror}", "check that the checkpoint is there") from None

    def read(self, into: memoryview, start: int, needed: int) -> None:
        """Fill ``into`` from offset ``start``, of which the file must have ``needed`` bytes."""
        done = 0
        try:
            while done < len(into):
                n = os.preadv(self.descriptor, [into[done:]], start + done)
                done += n
                if n == 0 or (n % PAGE and self.direct):  # the end of the file
                    break
        except OSError as e:
            raise UserError(f"{self.path} cannot be read: {e.strerror}", "check the disk it is on") from None
        if done < needed:
            raise UserError(
                f"{self.path} ends after byte {start + done}, {start + needed} are needed", "restore the file"
            )
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, start, len(into), os.POSIX_FADV_DONTNEED)


class Scratch:
    """An unlinked file in ``folder`` that layers are written to, so that nothing is left behind.

    Raises :class:`UserError` when the folder cannot be written or has too little space for ``need`` bytes.
    """

    def __init__(self, folder: Path, need: int) -> None:
        check_folder(folder, need)
        self.file = OpenFile(folder, *scratch_file(folder))
        self.end = 0

    def write(self, flat: Tensor) -> FileSource:
        """Write one layer, uint8 [size] on the host."""
        length = -(-flat.numel() // PAGE) * PAGE
        pages = aligned(length)
        pages[: flat.numel()].copy_(flat)
        view, done = memoryview(pages.numpy()), 0  # type: ignore[arg-type]
        try:
            while done < length:
                done += os.pwritev(self.file.descriptor, [view[done:]], self.end + done)
        except OSError as e:
            raise UserError(f"{self.file.path}: {e.strerror} while weights were written there",
                            "give path=… a folder with more space") from None  # fmt: skip
        found = FileSource([FileRange(self.file, self.end, length, flat.numel(), 0)])
        self.end += length
        return found


def aligned(size: int, pinned: bool = False) -> Tensor:
    """uint8 [size] of page-aligned host memory."""
    raw = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + size]


class Staging:
    """Pinned memory for reads from disk to a GPU."""

    def __init__(self, size: int) -> None:
        self.memory = mark_host(aligned(size, pinned=True))
        self.copied: torch.cuda.Event | None = None
        """When what was read last is on the device."""


@dataclass
class DeviceBuffer:
    """Device memory for weights that are stored elsewhere."""

    buffer: Tensor
    staging: Staging | None
    free: torch.cuda.Event | None = None
    """When the computation with the previous contents has finished."""


def device_buffers(sources: Sequence[Source], count: int, device: torch.device) -> list[DeviceBuffer]:
    """``count`` buffers, each of which holds the largest of ``sources``."""
    size, cuda = max(s.size for s in sources), device.type == "cuda"
    staged = cuda and any(isinstance(s, FileSource) for s in sources)
    return [
        DeviceBuffer(torch.empty(size, dtype=torch.uint8, device=device) if cuda else aligned(size),
                     Staging(size) if staged else None)
        for _ in range(count)
    ]  # fmt: skip


def bring(
    source: Source, to: DeviceBuffer, device: torch.device, stream: torch.cuda.Stream | None
) -> torch.cuda.Event | None:
    """Fill a buffer from its source, on a GPU by a copy on ``stream``; returns when that is done. The next read into
    other staging memory need not wait for the copy."""
    if stream is None:
        source.read(to.buffer)
        return None
    if isinstance(source, HostSource):
        host = source.flat
    else:
        assert to.staging is not None
        if to.staging.copied is not None:
            to.staging.copied.synchronize()
        host = to.staging.memory
        source.read(host)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        if to.free is not None:
            stream.wait_event(to.free)
        to.buffer[: source.size].copy_(host[: source.size], non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
    if to.staging is not None:
        to.staging.copied = done
    return done


class Ring(RingSpace):
    """Device memory that is handed out in consecutive pieces, and given back in the same order."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        cuda = device.type == "cuda"
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device) if cuda else aligned(size)

    def piece(self, size: int) -> Tensor | None:
        """A piece, uint8 [size], behind the last one; None while there is no room."""
        start = self.take(size)
        return None if start is None else self.buffer[int(start) : int(start) + size]


@dataclass
class LayerStream:
    """Streams groups of weights (of layers, or of parts of layers) to the device in the order in which they are used.

    They share ``capacity`` bytes. At most ``ahead`` groups are there before their turn; with 0 each is fetched when it
    is used, by the thread that computes.
    """

    groups: Sequence[Sequence[LayerTensor]]
    sources: Sequence[Source]
    device: torch.device
    ahead: int
    capacity: int
    bytes: int = 0
    """Number of bytes fetched so far."""
    waited: float = 0.0
    """Seconds that computation waited for them."""
    _pending: deque[tuple[int, DeviceBuffer, Callable[[], torch.cuda.Event | None]]] = field(default_factory=deque)
    """What is on its way; the call ends when it is there."""
    _active: DeviceBuffer | None = None
    _freed: torch.cuda.Event | None = None
    """When the computation with all that was given back, or that had the ring's memory before, has finished."""

    def __post_init__(self) -> None:
        files, cuda = any(isinstance(s, FileSource) for s in self.sources), self.device.type == "cuda"
        self._sizes = piece_sizes(self.sources)
        assert self.capacity >= max(self._sizes)
        self.ring = Ring(self.capacity, self.device)
        # Two, so that one is read into while the other is copied.
        self._staging = deque(Staging(max(self._sizes)) if files and cuda else None for _ in range(2))
        self._stream = torch.cuda.Stream(self.device) if cuda else None
        self._freed = torch.cuda.current_stream(self.device).record_event() if cuda else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """Hook the forward pass of each group's module: fetch its weights before, drop them after."""
        for i, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._before, i), prepend=True)
            module.register_forward_hook(partial(self._after, i), always_call=True)

    @contextlib.contextmanager
    def held(self, i: int) -> Iterator[None]:
        """Group ``i`` is there until the end, for several passes of its module."""
        try:
            self._before(i)
            yield
        finally:
            self._after(i)

    def _before(self, i: int, *_: Any) -> None:
        if not self._pending or self._pending[0][0] != i:
            self._restart(i)
        piece, arriving = self._pending.popleft()[1:]
        began = time.perf_counter()
        arrived = arriving()
        self.waited += time.perf_counter() - began
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        for t in self.groups[i]:
            t.bind(t.view(piece.buffer))
        self.bytes += self.sources[i].size
        self._active = piece

    def _after(self, i: int, *_: Any) -> None:
        for t in self.groups[i]:
            t.unbind(self.device)
        piece, self._active = self._active, None
        if piece is None:  # its weights were never fetched
            return
        if self._stream is not None:
            self._freed = torch.cuda.current_stream(self.device).record_event()
        self.ring.give()
        if self.ahead:
            self._fetch((self._pending[-1][0] if self._pending else i) + 1)

    def _restart(self, i: int) -> None:
        """Discard what was prefetched for another order, and restart at group ``i``."""
        if self._pending:
            self._pending.clear()
            self._thread.submit(int).result()  # behind all that was submitted before
        self.ring.clear()
        self._fetch(i)

    def _fetch(self, i: int) -> None:
        """Fetch group ``i`` and those behind it, as far as there is room."""
        while len(self._pending) < min(self.ahead + 1, len(self.groups)):
            i %= len(self.groups)
            piece = self.ring.piece(self._sizes[i])
            if piece is None:
                return
            to = DeviceBuffer(piece, self._staging[0], self._freed)
            self._staging.rotate()
            fetch = partial(bring, self.sources[i], to, self.device, self._stream)
            beside = self._beside(self.sources[i])
            self._pending.append((i, to, self._thread.submit(fetch).result if beside else fetch))
            i += 1

    def _beside(self, source: Source) -> bool:
        """Whether a thread fetches it while another group computes. A CPU's copies from host memory take the cores that
        compute: a second thread would add its wake-ups, and twice as many threads as cores."""
        return self.ahead > 0 and not (self.device.type == "cpu" and isinstance(source, HostSource))

    def tensors(self) -> Iterator[Tensor]:
        """The device's memory for weights."""
        yield self.ring.buffer


def piece_sizes(sources: Sequence[Source]) -> list[int]:
    """Bytes that each group takes of a :class:`Ring`: whole pages, where any is read from disk."""
    unit = PAGE if any(isinstance(s, FileSource) for s in sources) else _ALIGN
    return [-(-s.size // unit) * unit for s in sources]
