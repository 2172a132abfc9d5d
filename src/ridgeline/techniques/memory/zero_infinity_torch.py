"""Parameters that are on the device only while they are used (ZeRO-Infinity, arXiv:2104.07857, section 5.1).

The memory of a parameter's storage is freed and reallocated in place, so that everything that refers to it (autograd,
FSDP) remains valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import TieredStore
from ridgeline.nn.memory.tiled import TiledLinear
from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.host_optimizer import HostStates, ParameterGroup
from ridgeline.runtime.train_build import TrainBuild


@dataclass
class Residency:
    """Fetches each part's parameters before its forward and its backward, together with the next layer's, and frees
    them after use.

    Parts that are not layers stay from the start of a micro-batch to its end.
    """

    run: TrainBuild
    store: TieredStore
    host: HostStates
    here: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Parts on the device, with the handle that waits for their copy."""

    def __post_init__(self) -> None:
        run = self.run
        self.parts = {p.name: p for p in self.host.parts if p.trained or p.frozen}
        self.layers = [f"layers.{n}" for n in run.model.layers]
        self.ends = [n for n in self.parts if not n.startswith("layers.")]
        if run.device.type != "meta":  # where nothing will run
            _settle_shards(run.root)
        for part in self.parts.values():
            self._empty(part)
        return_freed_memory()
        run.root.register_forward_pre_hook(self._begin, prepend=True)
        for i, block in enumerate(run.model.layers.values()):
            block.register_forward_pre_hook(partial(self._before, i), prepend=True)
            block.register_forward_hook(partial(self._after, i), prepend=True)
        for name, module in run.model.named_modules():
            if isinstance(module, TiledLinear):
                module.fetch, module.drop = partial(self._tile, name, len(module.tiles)), partial(self._tile_done, name)
        self.host.left = lambda part: self._drop([part.name] if ".tiles." in part.name else [])
        run.sync = self._around(run.sync)
        run.hooks.after_evaluation = self._undone(run.hooks.after_evaluation)
        run.hooks.resident = self._resident(run.hooks.resident)

    # ---- one part ----

    def _tensors(self, part: ParameterGroup) -> list[Tensor]:
        return [local(p.detach()) for p in (*part.trained, *part.frozen)]

    def _empty(self, part: ParameterGroup) -> None:
        for t in self._tensors(part):
            t.untyped_storage().resize_(0)

    def _memory(self, part: ParameterGroup) -> list[Tensor]:
        """Allocate the part's parameters; views of it that autograd does not track."""
        views = []
        for t in self._tensors(part):
            storage = t.untyped_storage()
            start = int(t.storage_offset())
            storage.resize_((start + t.numel()) * t.element_size())
            views.append(torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, start, t.shape, t.stride()))
        return views

    def _fetch(self, name: str) -> None:
        if name not in self.here:
            part = self.parts[name]
            with torch.no_grad():
                self.here[name] = self.store.get(part.weights, self._memory(part))

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if self.here.pop(name, None) is not None:
                self._empty(self.parts[name])

    # ---- one micro-batch ----

    def _begin(self, *_: Any) -> None:
        self._prefetch_parts(0, 1)
        for name in self.ends:
            self._fetch(name)
            self.here[name]()

    def _prefetch_parts(self, *indices: int) -> None:
        """Start reading layers from disk."""
        for i in indices:
            if 0 <= i < len(self.layers) and self.layers[i] not in self.here:
                self.store.prefetch(self.parts[self.layers[i]].weights)

    def _wanted(self, i: int, step: int) -> None:
        """Layer ``i`` is in use, ``i + step`` is next."""
        near = [self.layers[k] for k in (i, i + step) if 0 <= k < len(self.layers)]
        self._drop([n for n in self.layers if n not in near])
        for name in near:
            self._fetch(name)
        self._prefetch_parts(i + 2 * step)
        self.here[near[0]]()

    def _before(self, i: int, *_: Any) -> None:
        self._wanted(i, 1)

    def _after(self, i: int, module: nn.Module, args: Any, out: Tensor) -> None:
        last = i + 1 == len(self.layers)
        self._drop(self.layers if last else [self.layers[i]])
        if out.requires_grad:
            out.register_hook(lambda _: self._wanted(i, -1))
            if last:
                self._prefetch_parts(i, i - 1)

    def _tile(self, linear: str, count: int, i: int) -> None:
        """Tile ``i`` is in use."""
        self._fetch(f"{linear}.tiles.{i}")
        after = i - 1 if torch._C._current_graph_task_id() != -1 else i + 1  # backward runs in the other direction
        if 0 <= after < count:
            self.store.prefetch(self.parts[f"{linear}.tiles.{after}"].weights)
        self.here[f"{linear}.tiles.{i}"]()

    def _tile_done(self, linear: str, i: int) -> None:
        self._drop([f"{linear}.tiles.{i}"])

    def _around(self, sync: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextmanager
        def around(last: bool) -> Iterator[None]:
            with sync(last):
                yield
            self._drop(list(self.here))

        return around

    def _undone(self, after: Callable[[], None]) -> Callable[[], None]:
        def undo() -> None:
            after()
            self._drop(list(self.here))

        return undo

    def _resident(self, inner: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextmanager
        def resident(changed: bool) -> Iterator[None]:
            with inner(changed), torch.no_grad():
                views = {name: self._memory(part) for name, part in self.parts.items()}
                for name, part in self.parts.items():
                    torch._foreach_copy_(views[name], self.store.open(part.weights))
                try:
                    yield
                finally:
                    if changed:
                        for name, part in self.parts.items():
                            torch._foreach_copy_(self.store.open(part.weights), views[name])
                    for part in self.parts.values():
                        self._empty(part)

        return resident


def _settle_shards(root: nn.Module) -> None:
    """Let FSDP set up its shards while they are allocated, and gather nothing ahead of our fetches."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
            module.set_modules_to_backward_prefetch([module])
