"""Which crossings of techniques, families and options `make test` runs; the nightly `make test-all` runs every one.

Cases are drawn by their names, the same in every run; those of one part always run. Some (a family under one way to
divide it, an optimizer in one layout) run at night only.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any
from zlib import crc32

import pytest

SHARE = 16
"""``make test`` runs one in so many crossings, drawn by their names."""


def crossing(name: str, share: int = SHARE) -> list[Any]:
    """The marks of the case ``name``: none, or that of a nightly one."""
    return [pytest.mark.nightly] if crc32(name.encode()) % share else []


def crossings(cases: Iterable[tuple[Any, ...]], share: int = SHARE, alone: int = 1) -> list[Any]:
    """Cases as parameters of one argument, named by their parts; those of ``alone`` parts or fewer always run."""
    out = []
    for case in cases:
        name = "+".join(map(str, case))
        out.append(pytest.param(case, marks=crossing(name, share) if len(case) > alone else [], id=name))
    return out


def named(names: Iterable[str], share: int = SHARE, nightly: Container[str] = ()) -> list[Any]:
    """Cases by name, of which those that cross several things ("tensor x zero 1", "low, hybrid") may be nightly, and
    those of ``nightly`` are."""
    crossed = {n: crossing(n, share) if " x " in n or ", " in n else [] for n in names}
    return [pytest.param(n, marks=[pytest.mark.nightly] if n in nightly else marks) for n, marks in crossed.items()]


def every_value(*axes: Sequence[Any]) -> list[Any]:
    """The product of ``axes`` as parameters. By day as many as the longest axis has values, each value of every axis
    among them."""
    by_day = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, at, strict=True)),
                     marks=[] if at in by_day else [pytest.mark.nightly])
        for at in itertools.product(*(range(len(axis)) for axis in axes))
    ]  # fmt: skip
