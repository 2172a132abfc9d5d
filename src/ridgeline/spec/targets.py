"""The linear layers of a model that a pattern matches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from ridgeline.spec.model import ModelSpec

ALL = ("all-linear", "*")
"""The pattern for every linear layer of the blocks."""


def linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Full name, such as ``layers.0.attention.q_proj`` → (out, in), of every plain linear layer of the blocks.

    Experts and routers are not included: they are not adapted.
    """
    return dict(_linears(spec))


@lru_cache(maxsize=256)  # called several times per prediction, thousands of times per search
def _linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for stack, count in (("encoder", spec.encoder_layers), ("layers", spec.num_layers)):
        for i in range(count):
            for p in spec.block_parameters(i, stack):
                if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                    found[p.name.removesuffix(".weight")] = (p.shape[0], p.shape[1])
    return found


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that ``pattern`` means: all (``all-linear`` or ``*``), or those of this last name, or those that it
    matches as a glob, or (if there are none of these) as a regular expression, over the full name."""
    names = list(names)
    if pattern in ALL:
        return names
    found = [n for n in names if n.rpartition(".")[2] == pattern]
    found = found or [n for n in names if fnmatchcase(n, pattern)]
    if found or not pattern:
        return found
    try:
        return [n for n in names if re.fullmatch(pattern, n)]
    except re.error:
        return []


def chosen(spec: ModelSpec, patterns: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The linear layers that any of the patterns names, in model order, with their shapes (out, in)."""
    return dict(_chosen(spec, tuple(patterns)))


@lru_cache(maxsize=256)
def _chosen(spec: ModelSpec, patterns: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    known = _linears(spec)
    wanted = {n for p in patterns for n in matching(p, known)}
    return {n: shape for n, shape in known.items() if n in wanted}


def shortest(wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """The shortest endings ("q_proj" of "layers.0.attention.q_proj") that name exactly ``wanted`` among ``known``."""
    wanted, known = list(wanted), list(known)
    inside = set(wanted)
    out: dict[str, None] = {}
    for name in wanted:
        parts = name.split(".")
        for i in range(len(parts) - 1, -1, -1):
            end = ".".join(parts[i:])
            if all(n in inside for n in known if n == end or n.endswith(f".{end}")):
                out[end] = None
                break
    return list(out)
