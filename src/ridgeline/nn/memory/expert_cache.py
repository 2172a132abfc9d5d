"""A mixture's experts stored in host memory or on disk, with a device cache of the most recently used ones (Eliseev and
Mazur, arXiv:2312.17238).

Every layer caches ``keep`` experts. Missing ones are fetched by a thread into one of ``staging`` additional buffers,
while the cached experts compute; that buffer then belongs to the layer, and the evicted expert's becomes free. Free
buffers are used to prefetch the experts that the next layer will probably need.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch

from ridgeline.nn.memory.layer_stream import DeviceBuffer, LayerTensor, Source, bring, device_buffers
from ridgeline.spec.errors import UserError

Policy = Literal["lru", "lfu"]
Key = tuple[int, int]
"""(layer, expert)."""
_Arrival = tuple[DeviceBuffer, "Future[torch.cuda.Event | None]"]


@dataclass
class ExpertCache:
    """The experts of all layers. ``tensors`` and ``sources`` are of each layer's experts."""

    tensors: Sequence[Sequence[Sequence[LayerTensor]]]
    sources: Sequence[Sequence[Source]]
    device: torch.device
    keep: int
    staging: int
    policy: Policy = "lru"
    uses: int = 0
    """Number of experts needed so far, in all layers."""
    hits: int = 0
    """Number of those that were cached."""
    guessed: int = 0
    """Number of those that were missing, but prefetched or being fetched because the previous layer predicted them."""
    bytes: int = 0
    """Number of bytes fetched."""
    _guesses: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = len(self.tensors)
        self.kept: list[OrderedDict[int, DeviceBuffer]] = [OrderedDict() for _ in range(layers)]
        """By layer, its cached experts, least recently used first."""
        self._counts = [[0] * len(experts) for experts in self.tensors]
        flat = [source for layer in self.sources for source in layer]
        self.buffers = device_buffers(flat, layers * self.keep + self.staging, self.device)
        self._free = list(self.buffers)
        self._coming: OrderedDict[Key, _Arrival] = OrderedDict()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts")

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Announce the experts that ``layer`` will probably need, most probable first; they are fetched into buffers
        that the running layer leaves free."""
        self._guesses = {layer: [e for e in experts if e not in self.kept[layer]]}

    def use(self, layer: int, needed: Sequence[int]) -> Iterator[int]:
        """The experts ``needed`` by a pass, each on the device until the next is requested: first the cached ones, then
        those that must be fetched."""
        self._guesses.pop(layer, None)
        kept = self.kept[layer]
        here = [e for e in needed if e in kept]
        missing = sorted((e for e in needed if e not in kept), key=lambda e: (layer, e) not in self._coming)
        self.uses, self.hits = self.uses + len(needed), self.hits + len(here)
        self.guessed += sum((layer, e) in self._coming for e in missing)
        wanted = {(layer, e) for e in missing}
        for e in missing:
            if not self._start((layer, e), wanted):
                break
        self._speculate(wanted)
        for e in here:
            self._touch(layer, e)
            yield e
        for i, e in enumerate(missing):
            self._keep(layer, e, self._arrived((layer, e), wanted))
            wanted.discard((layer, e))
            for later in missing[i + 1 :]:
                if not self._start((layer, later), wanted):
                    break
            yield e
        self._speculate(set())

    # ---- what is kept ----

    def _touch(self, layer: int, e: int) -> None:
        self._counts[layer][e] += 1
        self.kept[layer].move_to_end(e)

    def _keep(self, layer: int, e: int, buffer: DeviceBuffer) -> None:
        kept = self.kept[layer]
        if len(kept) == self.keep:
            counts = self._counts[layer]
            victim = next(iter(kept)) if self.policy == "lru" else min(kept, key=lambda k: counts[k])
            for t in self.tensors[layer][victim]:
                t.unbind(self.device)
            self._release(kept.pop(victim))
        kept[e] = buffer
        self._touch(layer, e)
        for t in self.tensors[layer][e]:
            t.bind(t.view(buffer.buffer))

    def _release(self, buffer: DeviceBuffer) -> None:
        if self._stream is not None:
            buffer.free = torch.cuda.current_stream(self.device).record_event()
        self._free.append(buffer)

    # ---- what comes ----

    def _start(self, key: Key, wanted: set[Key]) -> bool:
        """Begin to fetch an expert; False if every buffer is occupied by ``wanted`` ones."""
        if key in self._coming:
            return True
        if len(self._coming) >= self.staging and not self._forget(wanted):
            return False
        buffer, source = self._free.pop(0), self.sources[key[0]][key[1]]
        self._coming[key] = buffer, self._thread.submit(bring, source, buffer, self.device, self._stream)
        self.bytes += source.size
        return True

    def _forget(self, wanted: set[Key]) -> bool:
        """Discard the oldest prefetched expert that is not ``wanted``."""
        for key, (buffer, arriving) in self._coming.items():
            if key not in wanted:
                with contextlib.suppress(UserError):
                    arriving.result()
                del self._coming[key]
                self._free.append(buffer)
                return True
        return False

    def _arrived(self, key: Key, wanted: set[Key]) -> DeviceBuffer:
        self._start(key, wanted - {key})
        buffer, arriving = self._coming[key]
        try:
            event = arriving.result()
        except UserError:
            del self._coming[key]
            self._free.append(buffer)
            raise
        del self._coming[key]
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return buffer

    def _speculate(self, wanted: set[Key]) -> None:
        """Prefetch announced experts while buffers are free."""
        for layer, experts in self._guesses.items():
            for e in experts:
                key = (layer, e)
                if e not in self.kept[layer] and key not in self._coming and len(self._coming) < self.staging:
                    self._start(key, wanted)
