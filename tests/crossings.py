"""Which crossings of techniques, families and options `make test` runs; the nightly `make test-all` runs every one.

Cases are drawn by their names, the same in every run; those of one part always run. Some (a family under one way to
divide it, an optimizer in one layout) run at night only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest

SHARE = 8
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


def named(names: Iterable[str], share: int = SHARE) -> list[Any]:
    """Cases by name, of which those that cross several things ("tensor x zero 1", "low, hybrid") may be nightly."""
    return [pytest.param(n, marks=crossing(n, share) if " x " in n or ", " in n else []) for n in names]
