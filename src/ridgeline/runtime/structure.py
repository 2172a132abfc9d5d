"""Structured pruning: which slices of which parameters must be removed together, and models without some of them.

The dimensions of a transformer's parameters are of a few kinds. All dimensions of one kind in one place form a group: a
unit that is removed must be removed from all of them.

* ``hidden`` (one group for the model): embeddings, every norm, what reads the residual stream and what writes to it;
* ``heads`` (of a layer): a unit is a key/value head with the query heads that share it: their rows of q, k and v and
  their columns of the output projection;
* ``inner`` (of a layer): rows of gate and up, columns of down; in a mixture, of all its experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.nn.model.init import allocate
from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.model import ModelSpec

Kind = Literal["hidden", "heads", "inner"]
Place = tuple[Kind, int]
"""A group: its kind and its layer (-1: the whole model)."""
Keep = Mapping[Place, Tensor]
"""Units to keep, int64 in ascending order, for every group that loses some."""

_ROWS: dict[str, Kind] = {"q_proj": "heads", "k_proj": "heads", "v_proj": "heads", "gate_proj": "inner",
                          "up_proj": "inner", "o_proj": "hidden", "down_proj": "hidden"}  # fmt: skip
_COLUMNS: dict[str, Kind] = {"q_proj": "hidden", "k_proj": "hidden", "v_proj": "hidden", "gate_proj": "hidden",
                             "up_proj": "hidden", "o_proj": "heads", "down_proj": "inner"}  # fmt: skip


class GroupPart(NamedTuple):
    """A dimension of a parameter that belongs to a group."""

    parameter: str
    dim: int
    width: int
    """Number of entries of the dimension for each unit."""
    carries: bool
    """Whether a factor on the unit in the parts so marked, and only there, is a factor on what the unit contributes."""


@dataclass(frozen=True)
class PrunedGroup:
    """The slices that must be removed together."""

    place: Place
    size: int
    """Number of units."""
    parts: tuple[GroupPart, ...]


def groups(spec: ModelSpec) -> dict[Place, PrunedGroup]:
    """Every group of the model, derived from its list of parameters."""
    sizes: dict[Kind, int] = {"hidden": spec.hidden_size, "heads": spec.num_kv_heads, "inner": spec.intermediate_size}
    parts: dict[Place, list[GroupPart]] = {}
    for name, shape, block in spec.parameters():
        layer = int(block.rpartition(".")[2]) if block.startswith("layers.") else -1
        for dim, kind in _dimensions(name, len(shape)):
            carries = kind == _COLUMNS.get(_leaf(name)) if kind != "hidden" else _writes(name)
            part = GroupPart(name, dim, shape[dim] // sizes[kind], carries)
            parts.setdefault((kind, -1 if kind == "hidden" else layer), []).append(part)
    return {place: PrunedGroup(place, sizes[place[0]], tuple(found)) for place, found in parts.items()}


def _leaf(name: str) -> str:
    """The projection's name; experts' parameters have no ``.weight``."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def _writes(name: str) -> bool:
    """Whether a parameter adds to the residual stream."""
    return _leaf(name) in ("o_proj", "down_proj", "tokens", "positions", "token_types")


def _dimensions(name: str, dims: int) -> Iterator[tuple[int, Kind]]:
    leaf = _leaf(name)
    if leaf in _ROWS:
        if name.endswith(".bias"):
            yield 0, _ROWS[leaf]
        else:  # the last two; a mixture's have their experts before
            yield dims - 2, _ROWS[leaf]
            yield dims - 1, _COLUMNS[leaf]
    elif leaf in ("q_norm", "k_norm"):
        return
    elif leaf.endswith("norm"):
        yield 0, "hidden"
    else:  # embeddings, routers, the head
        yield dims - 1, "hidden"


def scale(group: PrunedGroup, factor: Tensor, parameters: dict[str, Tensor]) -> None:
    """Multiply the contribution of the group's units by ``factor`` [units]: replaces some of ``parameters``.
    Differentiable."""
    for part in group.parts:
        if part.carries:
            before = parameters[part.parameter]
            shape = [1] * before.dim()
            shape[part.dim] = -1
            parameters[part.parameter] = before * factor.repeat_interleave(part.width).view(shape)


def smaller(spec: ModelSpec, kept: Mapping[Kind, int], layers: int | None = None) -> ModelSpec:
    """``spec`` with ``kept`` hidden channels, key/value heads and inner channels, and the first ``layers`` layers.

    RMSNorm divides by the mean over all channels. ``norm_eps`` changes so that, with the norm weights of :func:`cut`, a
    model without some channels computes what the whole one does when these are zero.
    """
    hidden, heads = kept.get("hidden", spec.hidden_size), kept.get("heads", spec.num_kv_heads)
    return spec.changed(**{
        "hidden_size": hidden, "num_kv_heads": heads, "num_heads": heads * (spec.num_heads // spec.num_kv_heads),
        "intermediate_size": kept.get("inner", spec.intermediate_size), "num_layers": layers or spec.num_layers,
        "norm_eps": spec.norm_eps * spec.hidden_size / hidden, "published_parameters": None,
    })  # fmt: skip


@torch.no_grad()
def cut(model: Transformer, keep: Keep, layers: Sequence[int] | None = None) -> Transformer:
    """A model with the units in ``keep`` (groups not named stay whole) and only ``layers``, with its own copy of the
    weights.

    It computes what ``model`` does with the other units' slices set to zero and the other layers skipped. Raises
    :class:`ValueError` where layers would keep different numbers of units, which no configuration can express.
    """
    old = model.spec
    chosen = list(range(old.num_layers)) if layers is None else list(layers)
    found = groups(old)
    kept: dict[Kind, int] = {}
    for kind in ("hidden", "heads", "inner"):
        places = [("hidden", -1)] if kind == "hidden" else [(kind, layer) for layer in chosen]
        counts = {len(keep[p]) if p in keep else found[p].size for p in places}  # type: ignore[index]
        if len(counts) > 1:
            raise ValueError(f"layers would keep {sorted(counts)} units of kind {kind}")
        kept[kind] = counts.pop()
    spec = smaller(old, kept, len(chosen))
    with torch.device("meta"):
        shrunk = Transformer(spec)
    some = next(model.parameters())
    allocate(shrunk, some.device, some.dtype)
    sources = dict(model.named_parameters())
    parts: dict[str, list[tuple[GroupPart, Tensor]]] = {}
    for place, units in keep.items():
        for part in found[place].parts:
            entries = (units[:, None] * part.width + torch.arange(part.width)).flatten()
            parts.setdefault(part.parameter, []).append((part, entries.to(some.device)))
    growth = math.sqrt(old.hidden_size / kept["hidden"])
    for name, target in shrunk.named_parameters():
        source = _source(name, chosen)
        value: Tensor = sources[source]
        for part, entries in parts.get(source, []):
            value = value.index_select(part.dim, entries)
        if name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            value = value * growth
        target.copy_(value)
    return shrunk


def _source(name: str, chosen: list[int]) -> str:
    """The original name of a parameter of the cut model."""
    if not name.startswith("layers."):
        return name
    _, index, rest = name.split(".", 2)
    return f"layers.{chosen[int(index)]}.{rest}"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name, all requiring gradients."""
    model.requires_grad_(True)
    return dict(model.named_parameters())
