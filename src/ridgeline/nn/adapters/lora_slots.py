"""Plain LoRA adapters of a served model in slots of stacked tensors, which kernels add for all rows of a step at once
(Punica, arXiv:2310.18547; S-LoRA, arXiv:2311.03285).

The base's projections stay merged: the adapters' update is added to the output of each product. Tensors keep their
addresses while adapters are loaded and unloaded, until more slots, a higher rank or another layer is needed; then
:attr:`LoraSlots.version` changes, and captured steps are stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ridgeline.nn.adapters.adapter import Adapter, put
from ridgeline.nn.adapters.lora_linear import LoRALinear
from ridgeline.nn.kernels.lora_stack import LEAST_RANK, Stack
from ridgeline.nn.model.joined_weights import Known

FEWEST = 4
"""Slots at first; they are doubled."""
AddLora = Callable[[Tensor, Tensor, Tensor, Stack], None]
"""As :func:`ridgeline.nn.kernels.grouped_lora.add_lora`."""


class LoraRows:
    """Which rows of the current step have which adapter."""

    def __init__(self, add: AddLora) -> None:
        self.add = add
        self.items: Tensor | None = None
        """int32 [blocks, 3], on the device: see :func:`~ridgeline.nn.kernels.grouped_lora.add_lora`. None: no row has
        an adapter."""


class LoraSite:
    """Linear layers that read the same input (vLLM's packed modules), whose adapters are stacked together."""

    def __init__(self, names: list[str], parts: list[nn.Module], rows: LoraRows) -> None:
        self.names, self.rows = names, rows
        self.widths = tuple(int(p.out_features) for p in parts)  # type: ignore[arg-type]
        self.width = int(parts[0].in_features)  # type: ignore[arg-type]
        self.stack: Stack | None = None

    @property
    def on(self) -> bool:
        """Whether rows of this step may have adapters here."""
        return self.rows.items is not None and self.stack is not None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' update of ``x`` [..., in] to the base's output ``y`` [..., Σ out], in place."""
        assert self.rows.items is not None
        assert self.stack is not None
        rows = x.reshape(-1, self.width).to(self.stack.a.dtype).contiguous()
        y = y.contiguous()
        self.rows.add(rows, y.view(len(rows), -1), self.rows.items, self.stack)
        return y

    def numel(self, slots: int, capacity: int) -> int:
        """Elements of a stack with ``slots`` slots of ``capacity`` ranks each."""
        return slots * capacity * (len(self.widths) * self.width + sum(self.widths))

    def grown(self, slots: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Stack:
        """A larger stack with the current contents: ``slots`` slots of ``capacity`` ranks each."""
        slices, outs, old = len(self.widths), sum(self.widths), self.stack
        new = Stack(
            torch.zeros(slots, slices * capacity, self.width, device=device, dtype=dtype),
            torch.zeros(slots, capacity, outs, device=device, dtype=dtype),
            torch.zeros(slots, slices, device=device, dtype=torch.int32),
            torch.ones(slots, slices, device=device),
            self.widths,
        )
        if old is not None:
            n, r = len(old.b), old.capacity
            new.a.view(slots, slices, capacity, -1)[:n, :, :r] = old.a.view(n, slices, r, -1)
            new.b[:n, :r] = old.b
            new.ranks[:n], new.scales[:n] = old.ranks, old.scales
        return new

    def place(self, slot: int, adapters: Mapping[str, LoRALinear], fill: bool) -> None:
        """Make the adapters of these layers views of ``slot``; ``fill``: copy their values there first."""
        stack, begin = self.stack, 0
        assert stack is not None
        for i, (name, n) in enumerate(zip(self.names, self.widths, strict=True)):
            adapter = adapters.get(name)
            if adapter is not None:
                rank = len(adapter.lora_a)
                a = stack.a[slot, i * stack.capacity : i * stack.capacity + rank]
                b = stack.b[slot, :rank, begin : begin + n].t()
                if fill:
                    a.copy_(adapter.lora_a)
                    b.copy_(adapter.lora_b)
                    stack.scales[slot, i], stack.ranks[slot, i] = adapter.scale, rank
                adapter.lora_a.data, adapter.lora_b.data = a, b
            begin += n


class AddedLora(nn.Module):
    """A layer outside of merged projections, with the adapters' update."""

    def __init__(self, base: nn.Module, site: LoraSite) -> None:
        super().__init__()
        self.base, self.site = base, site

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        y: Tensor = self.base(x)
        return self.site.add(x, y) if self.site.on else y


class LoraSlots:
    """The slots, by the names of their adapters."""

    def __init__(self, model: nn.Module, add: AddLora) -> None:
        self.model, self.rows = model, LoraRows(add)
        weight = next(p for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
        self.device, self.dtype = weight.device, weight.dtype
        self.slot: dict[str, int] = {}
        self.version = 0
        """Counts how often tensors have moved."""
        self.count, self.capacity = 0, LEAST_RANK
        self._adapters: dict[str, dict[str, LoRALinear]] = {}
        self._sites: list[LoraSite] = []
        self._of: dict[str, LoraSite] = {}
        """The site of each layer that may have an adapter."""
        self._known: dict[str, Known] = {}
        """What is merged, by the name of its first layer."""
        self._around: dict[str, AddedLora] = {}
        """The layers that are replaced while adapters are added."""
        self._merged()

    def _merged(self) -> None:
        names = {module: name for name, module in self.model.named_modules()}
        for module in self.model.modules():
            for how in (vars(module).get("project"), vars(module).get("expand")):
                known = how.keywords.get("known") if isinstance(how, partial) else None
                if isinstance(known, Known):
                    site = LoraSite([names[p] for p in known.parts], known.parts, self.rows)
                    self._known[site.names[0]] = known
                    self._of |= dict.fromkeys(site.names, site)

    def shapes(self) -> set[tuple[int, tuple[int, ...]]]:
        """(inputs, outputs of each slice) of the products that adapters may add to: merged ones, and all others."""
        merged = {(site.width, site.widths) for site in self._of.values()}
        layers = {name: m for name, m in self.model.named_modules() if name not in self._of}
        sizes = ((getattr(m, "in_features", None), getattr(m, "out_features", None)) for m in layers.values())
        return merged | {(k, (n,)) for k, n in sizes if isinstance(k, int) and isinstance(n, int)}

    @staticmethod
    def takes(adapters: Mapping[str, Adapter]) -> bool:
        """Whether adapters, by the names of their layers, are all of this kind."""
        return all(
            type(a) is LoRALinear and a.lora_m is None and (a.dropout is None or not a.dropout.on)
            for a in adapters.values()
        )

    def bytes_with(self, adapters: Mapping[str, Adapter], leaving: int = 0) -> int:
        """Bytes of all slots once these adapters are loaded and ``leaving`` others unloaded."""
        sites = self._needed(adapters)
        count, capacity = self._size(adapters, leaving)
        return sum(site.numel(count, capacity) for site in sites) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(site.numel(self.count, self.capacity) for site in self._sites) * self.dtype.itemsize

    def reserve(self, adapters: Mapping[str, Adapter], leaving: int = 0) -> None:
        """Allocate slots for these adapters as well; ``leaving`` loaded ones are about to be unloaded. Nothing changes
        if memory runs out."""
        sites, size = self._needed(adapters), self._size(adapters, leaving)
        same = size == (self.count, self.capacity)
        if same and len(sites) == len(self._sites):
            return
        self.uninstall()
        stacks = [s.stack if same and s.stack is not None else s.grown(*size, self.device, self.dtype) for s in sites]
        for site, stack in zip(sites, stacks, strict=True):
            site.stack = stack
        (self.count, self.capacity), self._sites, self.version = size, sites, self.version + 1
        self._of |= {at: site for site in sites for at in site.names}
        for name, slot in self.slot.items():
            for site in sites:
                site.place(slot, self._adapters[name], fill=False)

    def add(self, name: str, adapters: Mapping[str, Adapter]) -> None:
        """Copy an adapter to a slot, for which there is room; its tensors are views of that from then on."""
        mine = {at: a for at, a in adapters.items() if isinstance(a, LoRALinear)}
        slot = min(set(range(self.count)) - set(self.slot.values()))
        self.slot[name], self._adapters[name] = slot, mine
        for site in self._sites:
            site.place(slot, mine, fill=True)

    def remove(self, name: str) -> None:
        """Free an adapter's slot, for another one."""
        slot = self.slot.pop(name)
        del self._adapters[name]
        for site in self._sites:
            assert site.stack is not None
            site.stack.ranks[slot] = 0

    def release(self) -> None:
        """Free the memory of the slots, if all are free."""
        if self.slot or not self._sites:
            return
        self.uninstall()
        for site in self._sites:
            site.stack = None
        self._sites, self.count, self.capacity, self.version = [], 0, LEAST_RANK, self.version + 1

    def install(self) -> None:
        """Let the model add the adapters' updates, in every layer that one of them has."""
        if self._around or not self._sites:
            return
        for site in self._sites:
            if site.names[0] in self._known:
                self._known[site.names[0]].site = site
            else:
                (name,) = site.names
                self._around[name] = AddedLora(self.model.get_submodule(name), site)
                put(self.model, name, self._around[name])

    def uninstall(self) -> None:
        """Restore the base model."""
        for name, added in self._around.items():
            put(self.model, name, added.base)
        for known in self._known.values():
            known.site = None
        self._around = {}

    def _needed(self, adapters: Mapping[str, Adapter]) -> list[LoraSite]:
        """The sites in use, and those that these adapters need beside them."""
        found = list(self._sites)
        for name, adapter in adapters.items():
            site = self._of.get(name) or LoraSite([name], [adapter.base], self.rows)
            if site not in found and (name in self._of or all(name not in s.names for s in found)):
                found.append(site)
        return found

    def _size(self, adapters: Mapping[str, Adapter], leaving: int = 0) -> tuple[int, int]:
        """(slots, ranks of each) to allocate: powers of two."""
        rank = max((len(a.lora_a) for a in adapters.values() if isinstance(a, LoRALinear)), default=1)
        count = max(self.count, FEWEST)
        while count <= len(self.slot) - leaving:
            count *= 2
        return count, max(self.capacity, 1 << (rank - 1).bit_length())
