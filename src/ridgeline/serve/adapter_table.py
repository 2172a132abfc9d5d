"""The task table: adapters of many tasks over one base, loaded and unloaded while it serves (PetS, USENIX ATC 2022;
unified paging as in S-LoRA, arXiv:2311.03285: an adapter's memory is taken out of the block pool's).

A step's rows are ordered by adapter, so that each layer's shared product is one and each task's part a few more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ridgeline.nn.adapters.adapter import Adapter, Tasks
from ridgeline.nn.adapters.fixed import fixed
from ridgeline.nn.model.transformer import Transformer
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.request import Invalid
from ridgeline.serve.sequence import Sequence
from ridgeline.spec.plan import Call
from ridgeline.spec.targets import chosen
from ridgeline.techniques.adapters.adapted import peft_kind
from ridgeline.train.adapter_folder import Loaded, adapters, load_adapter

PROBED = 8
"""Rank of the adapter that represents all others when costs are measured."""


class AdapterTable:
    """The loaded adapters, by name."""

    def __init__(self, model: Transformer, blocks: Blocks, block_bytes: float, longest: int) -> None:
        """``block_bytes``: memory of a block of the pool. ``longest``: tokens of the longest request, which must always
        fit, or it would never end."""
        self.model, self.blocks, self.block_bytes, self.longest = model, blocks, block_bytes, longest
        self.tasks = Tasks(model)
        self.held: dict[str, list[int]] = {}
        self.loads = 0
        self.version: dict[str, int] = {}
        """The number of the load that brought each: what the cache holds of an older one of that name is not its."""

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def load(self, name: str, folder: Path, replace: bool = False) -> None:
        """Read an adapter; ``replace``: in place of one of that name, which stays if this fails. Raises
        :class:`UserError` for a folder that does not fit, :class:`Invalid` for a name that is taken or a pool without
        room."""
        old = self.held.get(name) if replace else None
        if not name or (name in self.held and not replace):
            raise Invalid("lora_name", f"{name!r} is {'taken' if name else 'no name'}", "choose another, or unload it")
        loaded = load_adapter(folder, self.model.spec)
        self.tasks.activate(None)
        ready = {at: fixed(adapter) for at, adapter in adapters(self.model, loaded).items()}
        size = sum(_bytes(adapter) for adapter in ready.values())
        wanted = math.ceil(size / self.block_bytes) if self.blocks.count else 0  # an encoder has no pool to share
        taken = self.blocks.borrowed - len(old or ())
        free, spare = self.blocks.free + len(old or ()), self.blocks.count - taken - self.blocks.needed(self.longest)
        if wanted > min(free, max(0, spare)):
            raise Invalid(
                "lora_path",
                f"takes {size} bytes, {wanted} blocks, of which {free} are free now, and {max(0, spare)} can be spared"
                f" beside a request of {self.longest} tokens",
                "unload another adapter, give the pool more memory, or set a shorter max_model_len",
            )
        if old is not None:
            self.unload(name)
        self.tasks.add(name, ready)
        self.held[name] = self.blocks.borrow(wanted) or []
        self.loads += 1
        self.version[name] = self.loads

    def unload(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises :class:`Invalid` for an unknown one."""
        if name not in self.held:
            raise Invalid("lora_name", f"{name!r} is not loaded", f"loaded: {', '.join(self.held) or 'none'}")
        self.tasks.remove(name)
        self.blocks.give_back(self.held.pop(name))
        del self.version[name]

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Route all rows through a LoRA of rank 8 around every linear layer, to measure its time."""
        spec = self.model.spec
        wanted = chosen(spec, ("all-linear",))
        state = {f"{name}.{leaf}": torch.zeros(size) for name, (out, into) in wanted.items()
                 for leaf, size in (("lora_a", (PROBED, into)), ("lora_b", (out, PROBED)))}  # fmt: skip
        call = Call(name=peft_kind().card.name, options={"rank": PROBED, "targets": ["all-linear"]})
        self.tasks.add("", {at: fixed(a) for at, a in adapters(self.model, Loaded(call, state)).items()})
        self.tasks.activate_rows([("", slice(None))], dim=1)
        try:
            yield
        finally:
            self.tasks.remove("")

    def scope(self, name: str) -> bytes:
        """The key that marks cache blocks computed with an adapter."""
        return f"{name}@{self.version[name]}".encode() if name else b""

    def activate(self, batch: list[tuple[Sequence, int]], rows: list[int]) -> None:
        """Route each row of a batch, ordered by adapter, through its own adapter. ``rows``: of each sequence."""
        segments: list[tuple[str | None, slice]] = []
        row = 0
        for (seq, _), n in zip(batch, rows, strict=True):
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
