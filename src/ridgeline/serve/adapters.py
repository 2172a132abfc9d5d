"""The task table: adapters of many tasks over one base, loaded and unloaded while it serves (PetS, USENIX ATC 2022;
unified paging as in S-LoRA, arXiv:2311.03285: an adapter's memory is taken out of the block pool's).

A step's rows are ordered by adapter, so that each layer's shared product is one and each task's part a few more.
"""

from __future__ import annotations

import math
from pathlib import Path

from ridgeline.nn.adapters.base import Adapter, Tasks
from ridgeline.nn.adapters.fixed import fixed
from ridgeline.nn.transformer import Transformer
from ridgeline.serve.blocks import Blocks
from ridgeline.serve.request import Invalid
from ridgeline.serve.sequence import Sequence
from ridgeline.train.adapters import adapters, load_adapter


class AdapterTable:
    """The adapters that can be asked for, by name."""

    def __init__(self, model: Transformer, blocks: Blocks, block_bytes: float) -> None:
        """``block_bytes``: memory of a block of the pool."""
        self.model, self.blocks, self.block_bytes = model, blocks, block_bytes
        self.tasks = Tasks(model)
        self.held: dict[str, list[int]] = {}
        self.version: dict[str, int] = {}
        """How often each name was loaded: what the cache holds of an older one must not be taken for the new one's."""

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter. Raises :class:`UserError` for a folder that does not fit, :class:`Invalid` for a name that
        is taken or a pool without room."""
        if not name or name in self.held:
            raise Invalid("lora_name", f"{name!r} is {'taken' if name else 'no name'}", "choose another, or unload it")
        loaded = load_adapter(folder, self.model.spec)
        self.tasks.activate(None)
        made = {at: fixed(adapter) for at, adapter in adapters(self.model, loaded).items()}
        size = sum(_bytes(adapter) for adapter in made.values())
        blocks = self.blocks.borrow(math.ceil(size / self.block_bytes))
        if blocks is None:
            raise Invalid(
                "lora_path",
                f"takes {size} bytes, and the pool has {self.blocks.free} free blocks of {self.block_bytes:.0f}",
                "unload another adapter, or give the pool more memory",
            )
        self.tasks.add(name, made)
        self.held[name] = blocks
        self.version[name] = self.version.get(name, 0) + 1

    def unload(self, name: str) -> None:
        """Forget an adapter that nobody is using. Raises :class:`Invalid` for an unknown one."""
        if name not in self.held:
            raise Invalid("lora_name", f"{name!r} is not loaded", f"loaded: {', '.join(self.held) or 'none'}")
        self.tasks.remove(name)
        self.blocks.give_back(self.held.pop(name))

    def scope(self, name: str) -> bytes:
        """What a cache block computed with an adapter is marked with."""
        return f"{name}@{self.version[name]}".encode() if name else b""

    def activate(self, batch: list[tuple[Sequence, int]]) -> None:
        """Let each row of a batch, ordered by adapter, go through its own."""
        segments: list[tuple[str | None, slice]] = []
        row = 0
        for seq, n in batch:
            name = seq.group.request.adapter or None
            if segments and segments[-1][0] == name:
                segments[-1] = (name, slice(segments[-1][1].start, row + n))
            else:
                segments.append((name, slice(row, row + n)))
            row += n
        if self.held:
            self.tasks.activate_rows(segments, dim=1)


def _bytes(adapter: Adapter) -> int:
    total = 0
    for t in adapter.state().values():
        parts = [t.values(), t.col_indices(), t.crow_indices()] if t.is_sparse_csr else [t]
        total += sum(p.nbytes for p in parts)
    return total
