"""The builder that the compression driver hands to each technique, and what it then shows to what they registered.

The driver walks the checkpoint block by block. In each block it visits sites in the order of the data: the linear
layers that read one and the same input (query, key and value; output; gate and up; down; and likewise every expert's,
one by one or several experts' together).
By then everything before the site is compressed, and the site's inputs are those of the compressed model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    """As in the torch twin: ``layers.3.attention.q_proj``, ``layers.3.mlp.experts.5.up_proj``."""
    weight: Tensor
    """[out, in] fp32: what the layer computes with, as it stands."""
    original: Tensor
    """The weight that the site was reached with."""
    keep: Tensor | None = None
    """bool [out, in]: the support that a pruning step left; quantizers keep it."""
    stored: Stored | None = None
    """What is written in the place of a dense weight; must expand to ``weight``."""
    input: InputCode | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """For the report: what the step wants to tell of this layer (damping, fallback, chosen group size, …)."""

    def store(self, stored: Stored, weight: Tensor | None = None) -> None:
        """Take ``stored`` as the layer's weight from here on; ``weight``: what it expands to, where that is at hand."""
        self.stored, self.weight = stored, stored.dense() if weight is None else weight


@dataclass
class Site:
    """The linear layers of a block that read one input."""

    name: str
    """``layers.3.attention.qkv``, ``.attention.o``, ``.mlp.up``, ``.mlp.down``; experts: ``.mlp.experts.5.up``."""
    layers: list[LinearLayer]
    gram: Tensor | None
    """H [in, in] fp32 of the site's inputs (``wants`` has "gram"); the identity for an expert that no token reached."""
    tokens: int
    """Calibration rows behind it."""
    peak: Tensor | None
    """max |x| [in] of the site's input in the block as it was before anything in it changed (``wants`` has "peak")."""

    def error(self, layer: LinearLayer) -> float | None:
        """Relative layer error under the site's H."""
        return None if self.gram is None else relative_error(layer.original, layer.weight, self.gram)

    def together(self) -> Tensor:
        """The layers' weights stacked, [sum of outs, in]: they can be solved as one."""
        weights = [layer.weight for layer in self.layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def keeps(self) -> Tensor | None:
        """The layers' supports stacked, bool [sum of outs, in]; None when all are dense."""
        if all(layer.keep is None for layer in self.layers):
            return None
        return torch.cat([torch.ones_like(la.weight, dtype=torch.bool) if la.keep is None else la.keep
                          for la in self.layers])  # fmt: skip


@dataclass(frozen=True)
class Together:
    """A step at sites that takes those of several experts at once: all their ``up``, or all their ``down``, of one
    shape. It is shown any other site alone. What is held at once are those experts' weights and second moments."""

    together: Callable[[list[Site]], None]
    experts: int
    """Most of them."""
    elements: int
    """Most numbers in their weights and second moments, unless one has more."""

    def __call__(self, site: Site) -> None:
        """A site alone."""
        self.together([site])

    def at_once(self, each: int) -> int:
        """Experts that are taken together where one has ``each`` numbers; 0: not even one is within the bound."""
        return min(self.experts, self.elements // each)


class HiddenStates(Protocol):
    """Hidden states of all calibration windows, in chunks [windows, seq, hidden] fp32."""

    def chunks(self) -> Iterator[Tensor]:
        """In order, views that may be written to."""


@dataclass
class BlockJob:
    """One decoder block before, or after, its sites are visited."""

    index: int
    block: TransformerBlock
    """Its weights in fp32, as they stand. A mixture's experts are not in it: they are read when they are visited."""
    inputs: HiddenStates
    """What the block reads in the compressed model."""
    target: HiddenStates | None
    """What the original block gives in the original model (``wants`` has "teacher")."""
    peaks: dict[str, Tensor]
    """Site name (without the block's own) → max |x| [in] (``wants`` has "peak")."""
    forward: Callable[[Tensor], Tensor]
    """The block on a chunk, with gradients to whatever requires them."""
    observe: Callable[[Callable[[str, Tensor], None]], None]
    """Runs all inputs through the block as it stands, without gradients, and shows what each site (without the block's
    own name, as in ``peaks``) reads, chunk by chunk."""
    settle: Callable[[], None]
    """Round norms, biases and routers to what the file will hold."""
    notes: dict[str, Any] = field(default_factory=dict)
    """For the report: what steps want to tell of this block."""


@dataclass
class ModelJob:
    """The whole model, for techniques that cannot stream (structured pruning): fp32, in memory."""

    model: Transformer
    """They may put another one here."""
    windows: Tensor
    """Calibration token ids [samples, seq]."""
    report: Callable[[dict[str, Any]], None]
    """Progress, as ``{"stage": text}``."""


@dataclass
class CompressBuild:
    """What the driver offers a technique. Techniques register steps in their canonical order."""

    experiment: Experiment
    spec: ModelSpec
    """Of the model that is compressed (after structured pruning: of the smaller one)."""
    device: torch.device
    scale_dtype: torch.dtype = torch.float16
    """What scales are stored in: bf16 for a bf16 checkpoint, else fp16."""
    whole: list[Callable[[ModelJob], None]] = field(default_factory=list)
    """On the whole model, before it is streamed."""
    before_block: list[Callable[[BlockJob], None]] = field(default_factory=list)
    """Before the block's sites: what folds scales, keeping the function."""
    at_site: list[Callable[[Site], None]] = field(default_factory=list)
    """Replaces weights of layers; a :class:`Together` those of several experts at once."""
    after_block: list[Callable[[BlockJob], None]] = field(default_factory=list)
    """When all weights of the block are final: what tunes the rest."""
    wants: set[str] = field(default_factory=set)
    """Statistics that must be gathered: "gram", "peak", "teacher"."""

    def affine(self, bits: int, group_size: int, symmetric: bool, mse: bool = False) -> Affine:
        """An integer grid whose scales are stored as this checkpoint's are."""
        return Affine(bits, group_size, symmetric, mse, self.scale_dtype)


def store(site: Site, packed: Stored, weight: Tensor | None = None, **notes: Any) -> None:
    """One record of the stacked layers becomes what each of them stores; ``weight``: what it expands to, where that is
    at hand; ``notes`` of all."""
    start = 0
    for layer in site.layers:
        end = start + len(layer.weight)
        layer.store(packed.rows(start, end), None if weight is None else weight[start:end])
        layer.notes.update(notes)
        start = end


def store_nearest(site: Site, grid: Affine, **notes: Any) -> None:
    """Round the site's layers to the nearest values of a grid with integer codes, within their supports."""
    weight, keep = site.together(), site.keeps()
    store(site, grid.fit(weight).pack(weight if keep is None else weight * keep), **notes)
