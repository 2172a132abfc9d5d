"""The builder that the compression driver passes to each technique, and the objects that it passes to their steps.

The driver processes the checkpoint block by block. In each block it visits sites in data-flow order: the linear layers
that read the same input (query, key and value; output; gate and up; down; and likewise every expert's, one by one or
several experts' together). At each site everything before it is already compressed, and the site's inputs are those of
the compressed model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.nn.model.transformer import Transformer, TransformerBlock
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Stored
from ridgeline.runtime.solve.grid import Affine
from ridgeline.runtime.solve.sweep import relative_error
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec


@dataclass
class LinearLayer:
    """One linear layer (or one projection of one expert)."""

    name: str
    """Name in the torch model: ``layers.3.attention.q_proj``, ``layers.3.mlp.experts.5.up_proj``."""
    weight: Tensor
    """[out, in] fp32: the current weight."""
    original: Tensor
    """The weight before the first step at this site."""
    keep: Tensor | None = None
    """bool [out, in]: the mask of a pruning step; quantizers preserve it."""
    stored: Stored | None = None
    """Stored instead of a dense weight; must expand to ``weight``."""
    input: InputCode | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """For the report: what the step records about this layer (damping, fallback, chosen group size, …)."""

    def store(self, stored: Stored, weight: Tensor | None = None) -> None:
        """Set ``stored`` as the layer's weight; ``weight``: what it expands to, if already known."""
        self.stored, self.weight = stored, stored.dense() if weight is None else weight

    def to(self, device: torch.device) -> None:
        """Move what it holds to a device."""
        self.weight, self.original, self.keep, self.stored = (
            moved(x, device) for x in (self.weight, self.original, self.keep, self.stored)
        )


def moved(x: Any, device: torch.device) -> Any:
    """A tensor, or a record of tensors, on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if not is_dataclass(x) or isinstance(x, type):
        return x
    new = copy.copy(x)
    for f in fields(x):
        object.__setattr__(new, f.name, moved(getattr(x, f.name), device))
    return new


@dataclass
class Site:
    """The linear layers of a block that read the same input."""

    name: str
    """``layers.3.attention.qkv``, ``.attention.o``, ``.mlp.up``, ``.mlp.down``; experts: ``.mlp.experts.5.up``."""
    layers: list[LinearLayer]
    gram: Tensor | None
    """H [in, in] fp32 of the site's inputs (``wants`` has "gram"); the identity for an expert that no token reached."""
    tokens: int
    """Number of calibration rows in H."""
    peak: Tensor | None
    """max |x| [in] of the site's input in the block before any changes (``wants`` has "peak")."""

    def to(self, device: torch.device) -> None:
        """Move everything to a device, unless it is there."""
        if all(layer.weight.device.type == device.type for layer in self.layers):
            return
        self.gram, self.peak = moved(self.gram, device), moved(self.peak, device)
        for layer in self.layers:
            layer.to(device)

    def error(self, layer: LinearLayer) -> float | None:
        """Relative layer error under the site's H."""
        return None if self.gram is None else relative_error(layer.original, layer.weight, self.gram)

    def together(self) -> Tensor:
        """The layers' weights stacked, [sum of outs, in], to be solved together."""
        weights = [layer.weight for layer in self.layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def keeps(self) -> Tensor | None:
        """The layers' masks stacked, bool [sum of outs, in]; None when all are dense."""
        if all(layer.keep is None for layer in self.layers):
            return None
        return torch.cat([torch.ones_like(la.weight, dtype=torch.bool) if la.keep is None else la.keep
                          for la in self.layers])  # fmt: skip


@dataclass(frozen=True)
class Together:
    """A step at sites that processes several experts at once: all their ``up``, or all their ``down``, of one shape. It
    gets any other site separately. Those experts' weights and second moments are in memory at once."""

    together: Callable[[list[Site]], None]
    experts: int
    """Maximum number of experts."""
    elements: int
    """Maximum number of elements in their weights and second moments, unless a single expert exceeds it."""

    def __call__(self, site: Site) -> None:
        """Process a single site."""
        self.together([site])

    def at_once(self, each: int) -> int:
        """Number of experts that are processed together where one has ``each`` elements; 0: not even one is within the
        limit."""
        return min(self.experts, self.elements // each)


class HiddenStates(Protocol):
    """Hidden states of all calibration windows, in chunks [windows, seq, hidden] fp32."""

    def chunks(self) -> Iterator[Tensor]:
        """Writable views, in order."""


@dataclass
class BlockJob:
    """One decoder block before, or after, its sites are visited."""

    index: int
    block: TransformerBlock
    """Its current weights in fp32. A mixture's experts are not in it: they are read when they are visited."""
    inputs: HiddenStates
    """The block's input in the compressed model."""
    target: HiddenStates | None
    """The original block's output in the original model (``wants`` has "teacher")."""
    peaks: dict[str, Tensor]
    """Site name (without the block's own) → max |x| [in] (``wants`` has "peak")."""
    forward: Callable[[Tensor], Tensor]
    """Runs the block on a chunk, with gradients to whatever requires them."""
    observe: Callable[[Callable[[str, Tensor], None]], None]
    """Runs all inputs through the block in its current state, without gradients, and passes each site's inputs (names
    without the block's own, as in ``peaks``) to a callback, chunk by chunk."""
    settle: Callable[[], None]
    """Round norms, biases and routers to the stored dtype."""
    notes: dict[str, Any] = field(default_factory=dict)
    """For the report: what steps record about this block."""


@dataclass
class ModelJob:
    """The whole model, for techniques that cannot stream (structured pruning): fp32, in memory."""

    model: Transformer
    """The model; a step may replace it."""
    windows: Tensor
    """Calibration token ids [samples, seq]."""
    report: Callable[[dict[str, Any]], None]
    """Progress, as ``{"stage": text}``."""


@dataclass
class CompressBuild:
    """The driver's interface for techniques. Techniques register steps in their canonical order."""

    experiment: Experiment
    spec: ModelSpec
    """Spec of the model that is compressed (after structured pruning: of the smaller one)."""
    device: torch.device
    scale_dtype: torch.dtype = torch.float16
    """Dtype of the scales: bf16 for a bf16 checkpoint, otherwise fp16."""
    whole: list[Callable[[ModelJob], None]] = field(default_factory=list)
    """Steps on the whole model, before it is streamed."""
    before_block: list[Callable[[BlockJob], None]] = field(default_factory=list)
    """Steps before the block's sites: fold scales without changing the function."""
    at_site: list[Callable[[Site], None]] = field(default_factory=list)
    """Steps that replace weights of layers; a :class:`Together` processes several experts at once."""
    after_block: list[Callable[[BlockJob], None]] = field(default_factory=list)
    """Steps after all weights of the block are final: they tune the rest."""
    wants: set[str] = field(default_factory=set)
    """Statistics to be collected: "gram", "peak", "teacher"."""

    def affine(self, bits: int, group_size: int, symmetric: bool, mse: bool = False) -> Affine:
        """An integer grid with scales in this checkpoint's dtype."""
        return Affine(bits, group_size, symmetric, mse, self.scale_dtype)


def store(site: Site, packed: Stored, weight: Tensor | None = None, **notes: Any) -> None:
    """Split one record of the stacked layers into what each of them stores; ``weight``: what it expands to, if already
    known; ``notes`` apply to all."""
    start = 0
    for layer in site.layers:
        end = start + len(layer.weight)
        layer.store(packed.rows(start, end), None if weight is None else weight[start:end])
        layer.notes.update(notes)
        start = end


def store_nearest(site: Site, grid: Affine, **notes: Any) -> None:
    """Round the site's layers to the nearest values of an integer grid, within their masks."""
    weight, keep = site.together(), site.keeps()
    store(site, grid.fit(weight).pack(weight if keep is None else weight * keep), **notes)
