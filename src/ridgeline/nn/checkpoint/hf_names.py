"""Mapping between our model's parameters and the tensors of a Hugging Face checkpoint.

The families' own names are in :mod:`ridgeline.spec.families`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.spec.errors import UserError
from ridgeline.spec.families import FAMILIES
from ridgeline.spec.families.family import Part
from ridgeline.spec.model import ModelSpec


class NamePair(NamedTuple):
    """One piece: ``ours[expert]`` equals ``theirs``, or its ``part``, transposed if so marked.

    One of our parameters may have several links (experts that the hub stores separately), and so may one of theirs
    (GPT-2's fused query, key and value).
    """

    ours: str
    theirs: str
    expert: int | None = None
    part: Part | None = None
    transpose: bool = False


def require_twin(spec: ModelSpec) -> None:
    """Raise :class:`UserError` for a model of a family that exists only as a spec."""
    if spec.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"model {spec.name!r} of family {spec.family!r} is spec only: it can be predicted, not run",
                        f"run a model of one of these families: {known}")  # fmt: skip


def links(spec: ModelSpec) -> Iterator[NamePair]:
    """Every piece of the model, in the layout of the hub's files (one tensor per expert).

    Raises :class:`UserError` for a family that is predicted, not run.
    """
    require_twin(spec)
    family = FAMILIES[spec.family]
    stacks = {"layers": (family.stack, family.modules(spec)),
              "encoder": (family.encoder_stack, family.modules(spec, "encoder"))}  # fmt: skip
    rest = family.rest
    for ours, _, block in spec.parameters():
        stack, _, index = block.partition(".")
        if stack not in stacks:
            module, kind = ours.rsplit(".", 1)
            lone = ours == "head.out.bias" and spec.head == "mlm"
            if spec.head in ("classify", "project"):
                module = module.replace("head.", f"{spec.head}.")
            yield NamePair(ours, "cls.predictions.bias" if lone else f"{rest[module]}.{kind}")
            continue
        inner = ours.removeprefix(f"{block}.")
        root, modules = stacks[stack]
        prefix = f"{root}.{index}"
        module, kind = inner.rsplit(".", 1)
        if module == "mlp.experts" and family.stacked is not None:
            name, part, transpose = family.stacked(spec, kind)
            yield NamePair(ours, f"{prefix}.{modules[module]}.{name}", part=part, transpose=transpose)
            continue
        if module == "mlp.experts":
            weight = family.experts.get(kind, kind)
            for e in range(spec.num_experts):
                yield NamePair(ours, f"{prefix}.{modules[module]}.{family.expert.format(e)}.{weight}.weight", expert=e)
            continue
        kind = family.leaves.get(kind, kind)
        transpose = family.transposed and kind == "weight" and "_norm" not in module
        yield NamePair(ours, f"{prefix}.{modules[module]}.{kind}", part=family.part(spec, module), transpose=transpose)


@lru_cache(maxsize=2)
def links_by_part(spec: ModelSpec) -> dict[str, list[NamePair]]:
    """:func:`links` of each layer (``layers.3``) and of what is outside them (``embed``, ``norm``, ``head``)."""
    parts: dict[str, list[NamePair]] = defaultdict(list)
    for link in links(spec):
        names = link.ours.split(".")
        parts[".".join(names[:2]) if names[0] == "layers" else names[0]].append(link)
    return dict(parts)


def whole_shape(link: NamePair, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor of theirs of which ``link`` maps a part of ``shape``."""
    wanted = list(shape)
    if link.transpose:
        wanted[-2:] = wanted[:-3:-1]
    if link.part is not None:
        dim = link.part.dim
        wanted[dim] = wanted[dim] // link.part.taken * link.part.of
    return tuple(wanted)


def joined(pieces: list[Tensor], part: Part | None) -> Tensor:
    """Their tensor from all its parts, each in their layout, in order."""
    if part is None:
        return pieces[0]
    if part.groups == 1:
        return torch.cat(pieces, part.dim)
    grouped = [p.unflatten(part.dim, (part.groups, -1)) for p in pieces]
    return torch.cat(grouped, part.dim + 1).flatten(part.dim, part.dim + 1)


def stacked(link: NamePair) -> NamePair | None:
    """The same piece in the layout of transformers ≥ 5, where a layer's experts are one tensor; None if it has none."""
    if link.expert is None:
        return link._replace(theirs=link.theirs.replace(".block_sparse_moe.gate.", ".mlp.gate."))
    prefix = re.split(r"\.block_sparse_moe\.|\.mlp\.", link.theirs)[0]
    if link.expert > 0:
        return None  # the first link stands for all
    if link.ours.endswith(".down_proj"):
        return NamePair(link.ours, f"{prefix}.mlp.experts.down_proj")
    part = Part(0 if link.ours.endswith(".gate_proj") else 1, 1, 2, 1)
    return NamePair(link.ours, f"{prefix}.mlp.experts.gate_up_proj", part=part)


def spellings(theirs: str) -> Iterator[str]:
    """The names under which a tensor is found in the hub's files, most likely first."""
    yield theirs
    if theirs == "shared.weight":
        yield "encoder.embed_tokens.weight"
        yield "decoder.embed_tokens.weight"
    yield f"language_model.{theirs}"  # beside an image encoder
    for prefix in ("transformer.", "model.", "bert.", "gpt_neox."):  # saved without their head, they have none
        if theirs.startswith(prefix):
            yield theirs.removeprefix(prefix)
    if ".LayerNorm." in theirs:  # BERT as converted from TensorFlow
        yield theirs.replace(".weight", ".gamma").replace(".bias", ".beta")
    if theirs == "cls.predictions.bias":
        yield "cls.predictions.decoder.bias"
