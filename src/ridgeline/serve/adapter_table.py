"""The task table: adapters of many tasks over one base, loaded and unloaded while it serves (PetS, USENIX ATC 2022;
unified paging as in S-LoRA, arXiv:2311.03285: an adapter's memory is taken out of the block pool's).

A step's rows are ordered by adapter, so that each layer's shared product is one and each task's part a few more. On a
GPU plain LoRA adapters lie in slots, and kernels add those of all rows at once
(:mod:`~ridgeline.nn.adapters.lora_slots`); a step with a row of another kind of adapter goes from task to task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ridgeline.nn.adapters.adapter import Adapter, Tasks
from ridgeline.nn.adapters.fixed import fixed
from ridgeline.nn.adapters.lora_slots import LoraSlots
from ridgeline.nn.kernels.lora_stack import Segment
from ridgeline.nn.model.transformer import Transformer
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.request import Invalid
from ridgeline.serve.sequence import Sequence
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call
from ridgeline.spec.targets import chosen
from ridgeline.techniques.adapters.adapted import peft_kind
from ridgeline.train.adapter_folder import Loaded, adapters, load_adapter

NOT_BY_ROW = "kv_b_proj"
"""Latent attention absorbs this layer's weight into the queries: no rows are multiplied by it."""
PROBED = 8
"""Rank of the adapter that represents all others when costs are measured."""


class AdapterTable:
    """The loaded adapters, by name."""

    def __init__(
        self, model: Transformer, blocks: Blocks, block_bytes: float, longest: int, slots: LoraSlots | None = None
    ) -> None:
        """``block_bytes``: memory of a block of the pool. ``longest``: tokens of the longest request, which must always
        fit, or it would never end. ``slots``: for plain LoRA, where there are kernels for it."""
        self.model, self.blocks, self.block_bytes, self.longest = model, blocks, block_bytes, longest
        self.tasks, self.slots = Tasks(model), slots
        self.held: dict[str, list[int]] = {}
        """Blocks whose memory each takes; those in slots take :attr:`shared` ones."""
        self.shared: list[int] = []
        """Blocks whose memory the slots take."""
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
        shared = next((key for key in loaded.state if NOT_BY_ROW in key), "")
        if shared:
            what = f"the adapter changes {shared.rpartition('.')[0]}, which latent attention multiplies into queries"
            raise UserError(f"{what} of all requests, not by each one's rows", "merge it into the model")
        self._base_alone()
        ready = {at: fixed(adapter) for at, adapter in adapters(self.model, loaded).items()}
        slots = self.slots if self.slots is not None and self.slots.takes(ready) else None
        again = name in slots.slot if slots is not None else False
        size = sum(map(_bytes, ready.values())) if slots is None else slots.bytes_with(ready, again)
        wanted = self._blocks(size)
        held = (0, 0) if slots is None else (slots.nbytes, len(self.shared))
        self._require_room(size - held[0], wanted - held[1], old or [])
        if slots is not None:
            try:
                slots.reserve(ready, again)
            except torch.OutOfMemoryError as e:
                raise Invalid("lora_path", f"the device has no memory for {size} bytes of adapters",
                              "unload another one, or serve with less memory for the cache") from e  # fmt: skip
        if old is not None:
            self._drop(name)
        self._add(name, ready)
        self.held[name] = [] if slots is not None else self.blocks.borrow(wanted) or []
        self._share()
        self.loads += 1
        self.version[name] = self.loads

    def _blocks(self, size: int) -> int:
        """Blocks that take as many bytes; an encoder has no pool to share."""
        return math.ceil(size / self.block_bytes) if self.blocks.count else 0

    def _require_room(self, size: int, wanted: int, old: list[int]) -> None:
        """Raise :class:`Invalid` if the pool cannot spare ``wanted`` blocks, for ``size`` bytes, once the ``old`` ones
        are returned."""
        taken = self.blocks.borrowed - len(old)
        free, spare = self.blocks.free + len(old), self.blocks.count - taken - self.blocks.needed(self.longest)
        if wanted > min(free, max(0, spare)):
            raise Invalid(
                "lora_path",
                f"takes {size} bytes, {wanted} blocks, of which {free} are free now, and {max(0, spare)} can be spared"
                f" beside a request of {self.longest} tokens",
                "unload another adapter, give the pool more memory, or set a shorter max_model_len",
            )

    def _base_alone(self) -> None:
        """Restore the base model, without any adapter."""
        self.tasks.activate(None)
        if self.slots is not None:
            self.slots.uninstall()

    def _add(self, name: str, ready: dict[str, Adapter]) -> None:
        if self.slots is not None and self.slots.takes(ready):
            self.slots.add(name, ready)
        self.tasks.add(name, ready)

    def _drop(self, name: str) -> None:
        self.tasks.remove(name)
        if self.slots is not None and name in self.slots.slot:
            self.slots.remove(name)
        self.blocks.give_back(self.held.pop(name, []))
        self.version.pop(name, None)

    def _share(self) -> None:
        """Borrow as many blocks of the pool as the slots take memory; none if no slot is used."""
        if self.slots is None:
            return
        self.slots.release()
        wanted = self._blocks(self.slots.nbytes)
        self.blocks.give_back(self.shared[wanted:])
        self.shared = [*self.shared[:wanted], *(self.blocks.borrow(max(0, wanted - len(self.shared))) or [])]

    def unload(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises :class:`Invalid` for an unknown one."""
        if name not in self.held:
            raise Invalid("lora_name", f"{name!r} is not loaded", f"loaded: {', '.join(self.held) or 'none'}")
        self._drop(name)
        self._share()

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Route all rows through a LoRA of rank 8 around every linear layer, to measure its time."""
        self.add_made("", PROBED)
        if self.slots is None:
            self.tasks.activate_rows([("", slice(None))], dim=1)
        else:
            self.slots.install()
        try:
            yield
        finally:
            self._base_alone()
            self._drop("")
            self._share()

    def add_made(self, name: str, rank: int, seed: int | None = None) -> None:
        """Have a LoRA around every linear layer, whose memory is not counted, for measurements: of random numbers, or
        with no ``seed`` of zeros."""
        every = chosen(self.model.spec, ("all-linear",))
        wanted = {layer: size for layer, size in every.items() if not layer.endswith(NOT_BY_ROW)}
        state = {f"{layer}.{leaf}": torch.zeros(size) for layer, (out, into) in wanted.items()
                 for leaf, size in (("lora_a", (rank, into)), ("lora_b", (out, rank)))}  # fmt: skip
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for t in state.values():
                t.normal_(0.0, 0.1, generator=generator)
        call = Call(name=peft_kind().card.name, options={"rank": rank, "targets": ["all-linear"]})
        self._base_alone()
        ready = {at: fixed(a) for at, a in adapters(self.model, Loaded(call, state)).items()}
        if self.slots is not None:
            self.slots.reserve(ready)
        self._add(name, ready)
        if name:
            self.held[name], self.version[name] = [], 0

    def scope(self, name: str) -> bytes:
        """The key that marks cache blocks computed with an adapter."""
        return f"{name}@{self.version[name]}".encode() if name else b""

    def route(self, batch: list[tuple[Sequence, int]], rows: list[int]) -> list[Segment] | None:
        """The rows of a batch, ordered by adapter, of each slot. ``rows``: of each sequence. None: some have an adapter
        that is in no slot."""
        segments = self._segments(batch, rows)
        if self.slots is None:
            return None if any(name in self.held for name, _, _ in segments) else []
        slot = self.slots.slot
        if any(name in self.held and name not in slot for name, _, _ in segments):
            return None
        return [(slot[name], first, end) for name, first, end in segments if name in slot]

    def activate(self, batch: list[tuple[Sequence, int]], rows: list[int]) -> None:
        """Route each row of a batch, ordered by adapter, through its own adapter. ``rows``: of each sequence."""
        if not self.held:
            return
        if self.slots is not None and self.route(batch, rows) is not None:
            if self.tasks.active is not None:
                self.tasks.activate(None)
            self.slots.install()
            return
        if self.slots is not None:
            self.slots.uninstall()
        segments = [(name or None, slice(first, end)) for name, first, end in self._segments(batch, rows)]
        self.tasks.activate_rows(segments, dim=1)

    def _segments(self, batch: list[tuple[Sequence, int]], rows: list[int]) -> list[tuple[str, int, int]]:
        """Each adapter of a batch, the first of its rows and the one behind the last."""
        segments: list[tuple[str, int, int]] = []
        row = 0
        for (seq, _), n in zip(batch, rows, strict=True):
            name = seq.group.request.adapter
            if segments and segments[-1][0] == name:
                segments[-1] = (name, segments[-1][1], row + n)
            else:
                segments.append((name, row, row + n))
            row += n
        return segments


def _bytes(adapter: Adapter) -> int:
    total = 0
    for t in adapter.state().values():
        parts = [t.values(), t.col_indices(), t.crow_indices()] if t.is_sparse_csr else [t]
        total += sum(p.nbytes for p in parts)
    return total
