"""Read latency and bandwidth of a disk, bypassing the page cache."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ridgeline.nn.memory.layer_stream import FileRange, FileSource, OpenFile, Scratch, aligned
from ridgeline.nn.memory.tiered_store import PAGE
from ridgeline.spec.device import Link

_BYTES = 64 << 20
_TIMES = 3
_PAUSES, _COMPUTED, _PRODUCT = 15, 2e-3, 256
"""Number of requests between computations, seconds that each computes, and width of its matrices."""


def folder_rate(folder: Path, title: str = "disk") -> Link:
    """Latency and bandwidth of reading a file in ``folder``, which is written for this and unlinked.

    Raises :class:`UserError` where the folder cannot be written.
    """
    source = Scratch(folder, _BYTES).write(torch.randint(256, (_BYTES,), dtype=torch.uint8))
    return _rate(source.ranges[0].file, _BYTES, title)


def file_rate(path: Path, title: str = "disk") -> Link:
    """The same for an existing file of at least one page, of which the first 64 MiB are read.

    Raises :class:`UserError` where it cannot be read.
    """
    return _rate(OpenFile.of(path), max(PAGE, min(_BYTES, path.stat().st_size // PAGE * PAGE)), title)


def read_seconds(folder: Path, sizes: list[int]) -> dict[int, float]:
    """Seconds of reading a number of bytes, whole pages, of a file in ``folder``, which is written for this.

    Raises :class:`UserError` where the folder cannot be written.
    """
    most = max(sizes)
    file = Scratch(folder, most).write(torch.randint(256, (most,), dtype=torch.uint8)).ranges[0].file
    into = aligned(most)
    return {size: _median(FileSource([FileRange(file, 0, size, size, 0)]), into) for size in sizes}


def _rate(file: OpenFile, size: int, title: str) -> Link:
    whole = FileSource([FileRange(file, 0, size, size, 0)])
    page = FileSource([FileRange(file, 0, PAGE, PAGE, 0)])
    into = aligned(size)
    once, seconds = (_median(source, into) for source in (page, whole))
    bandwidth = size / max(seconds - once, seconds / 2)
    latency = max(once, _between(file, size))
    direct = "O_DIRECT" if file.direct else "through the page cache"
    return Link(name=title, bandwidth=bandwidth, latency=latency,
                source=f"measured: {size >> 20} MiB read {direct}, median of {_TIMES}; pages between computations,"
                f" median of {_PAUSES}")  # fmt: skip


def _between(file: OpenFile, size: int) -> float:
    """Seconds of a request of one page that a thread makes for one that has just computed with all others, as weights
    are fetched: where threads sleep, or spin for their next operator, that takes longer than one request after another.
    """
    x, into = torch.randn(_PRODUCT, _PRODUCT), aligned(PAGE)
    step, times = size // _PAUSES // PAGE * PAGE, []
    with ThreadPoolExecutor(1) as reader:
        for i in range(_PAUSES):
            source = FileSource([FileRange(file, i * step, PAGE, PAGE, 0)])
            _uncache(file)
            until = time.perf_counter() + _COMPUTED
            while time.perf_counter() < until:
                x @ x
            start = time.perf_counter()
            reader.submit(source.read, into).result()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _median(source: FileSource, into: torch.Tensor) -> float:
    times = []
    for _ in range(_TIMES):
        _uncache(source.ranges[0].file)
        start = time.perf_counter()
        source.read(into)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _uncache(file: OpenFile) -> None:
    if not file.direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
