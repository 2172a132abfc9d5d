"""Base class of all adapters: a layer around a frozen one, whose effect can be applied to any rows, or merged.

One base serves several tasks: :class:`Tasks` holds the adapters of each by name, activates one task's, or processes a
batch whose rows belong to different tasks in one pass (PetS, USENIX ATC 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ridgeline.nn.parallel.collectives import local
from ridgeline.nn.quant.quantized import QuantizedLinear
from ridgeline.spec.errors import UserError, unknown


class Adapter(nn.Module):
    """A frozen linear layer ``base`` and a task's addition to it. Parameters other than ``base`` are the task's
    state."""

    leaves: ClassVar[tuple[str, ...]]
    """Names of the state's tensors."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.merged = False
        self._plain: Tensor | None = None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return int(self.base.in_features)

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return int(self.base.out_features)

    def delta(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output [..., out] with the task, from input ``x`` [..., in] and the base's output ``y`` [...,
        out] for it."""
        raise NotImplementedError

    def weight(self) -> Tensor:
        """The weight [out, in] of an equivalent linear layer. Raises :class:`UserError` if there is none."""
        raise NotImplementedError

    def bias(self) -> Tensor | None:
        """The bias [out] of that layer."""
        b = self.base.bias
        return None if b is None else local(b)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        y = self.base(x)
        return y if self.merged else self.delta(x, y)

    def state(self) -> dict[str, Tensor]:
        """The task's tensors by name."""
        return {name: getattr(self, name) for name in self.leaves}

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the task into the base's weight and bias; the original base is kept for :meth:`unmerge`.

        Raises :class:`UserError` for a quantized base, in which rounding would lose the update.
        """
        if self.merged:
            return
        base = self.base
        if not isinstance(base, nn.Linear):
            raise UserError("a quantized base cannot take an adapter into its codes: they would round it away",
                            "merge on the unquantized base")  # fmt: skip
        weight, bias = self.weight(), self.bias()
        self._kept = (base.weight, base.bias)
        base.weight = nn.Parameter(weight.to(base.weight.dtype), requires_grad=False)
        base.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone(), requires_grad=False))
        self.merged = True

    def unmerge(self) -> None:
        """Restore the base bit for bit."""
        if self.merged:
            self.base.weight, self.base.bias = self._kept
            del self._kept
            self.merged = False


def has_only_codes(base: nn.Module) -> bool:
    """Whether a linear layer has codes in place of a weight, which no adapter can read."""
    return not isinstance(base, QuantizedLinear) and not isinstance(getattr(base, "weight", None), Tensor)


def beside(base: Any) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of what is added to a linear layer: those of its weight; fp32 where there are only codes."""
    device = next(iter([*base.parameters(), *base.buffers()])).device
    if isinstance(base, QuantizedLinear):
        return device, base.dtype
    return device, torch.float32 if has_only_codes(base) else base.weight.dtype


def dense(base: nn.Module) -> Tensor:
    """The weight [out, in] of a linear layer, this rank's part if it is divided; dequantized."""
    if isinstance(base, QuantizedLinear):
        return base.dense()
    weight: Tensor = base.weight  # type: ignore[assignment]
    return local(weight)


def placed(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Every adapter in the model, with the full name of the layer that it wraps."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called ``name``."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def merge(model: nn.Module) -> None:
    """Merge every adapter of the model, in place."""
    for _, adapter in placed(model):
        adapter.merge()


def unmerge(model: nn.Module) -> None:
    """Undo :func:`merge`, bit for bit."""
    for _, adapter in placed(model):
        adapter.unmerge()


class Tasks:
    """The adapters of several tasks over one base model, whose tensors they share."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tasks: dict[str, dict[str, Adapter]] = {}
        self.active: str | None = None
        self.rows = Rows()
        self._bases: dict[str, nn.Module] = {}

    def add(self, task: str, adapters: dict[str, Adapter]) -> None:
        """Register a task's adapters, by the full name of the layer that each wraps; the base is not changed."""
        if task in self.tasks:
            raise UserError(f"there is an adapter {task!r} already", "remove it first, or give another name")
        if self.active == "*":
            self.activate(None)
        self.tasks[task] = adapters
        for name, adapter in adapters.items():
            self._bases.setdefault(name, adapter.base)

    def base(self, name: str) -> nn.Module:
        """The base layer called ``name``, without any adapter."""
        return self._bases.get(name) or self.model.get_submodule(name)

    def activate(self, task: str | None) -> None:
        """Activate one task's adapters; None: the base alone."""
        if task is not None and task not in self.tasks:
            raise unknown("adapter", task, self.tasks)
        self._restore()
        for name, adapter in self.tasks[task].items() if task is not None else ():
            put(self.model, name, adapter)
        self.active = task

    def remove(self, task: str) -> None:
        """Remove a task; if it was active, the base alone is left."""
        if task not in self.tasks:
            raise unknown("adapter", task, self.tasks)
        if self.active in (task, "*"):
            self.activate(None)
        del self.tasks[task]

    def activate_rows(self, tasks: Iterable[tuple[str | None, slice]], dim: int = 0) -> None:
        """Route rows of a batch (its dimension ``dim``) through the adapters of different tasks; None: the base
        alone."""
        segments = list(tasks)
        for task, _ in segments:
            if task is not None and task not in self.tasks:
                raise unknown("adapter", task, self.tasks)
        if self.active != "*":
            self._restore()
            for name in self._bases:
                mine = {task: adapters[name] for task, adapters in self.tasks.items() if name in adapters}
                put(self.model, name, Segmented(self.base(name), mine, self.rows))
            self.active = "*"
        self.rows.dim = dim
        self.rows.segments = [(task, rows) for task, rows in segments if task is not None]

    def _restore(self) -> None:
        for adapters in self.tasks.values():
            for adapter in adapters.values():
                if adapter.merged:
                    raise UserError("an adapter is merged into the base, which other tasks share", "unmerge it first")
        for name, base in self._bases.items():
            put(self.model, name, base)


@dataclass
class Rows:
    """Which rows of a batch, along ``dim``, belong to which task."""

    dim: int = 0
    segments: list[tuple[str, slice]] = field(default_factory=list)


class Segmented(nn.Module):
    """A frozen layer computed once for all rows, then each task's part for its own rows."""

    def __init__(self, base: nn.Module, adapters: dict[str, Adapter], rows: Rows) -> None:
        super().__init__()
        self.base = base
        self.adapters, self.rows = adapters, rows

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., in] → [B, ..., out]."""
        y: Tensor = self.base(x)
        out = y if torch.is_inference_mode_enabled() else y.clone()
        lead = (slice(None),) * self.rows.dim
        for task, rows in self.rows.segments:
            adapter = self.adapters.get(task)
            if adapter is not None:
                at = (*lead, rows)
                out[at] = adapter.delta(x[at], y[at])
        return out
