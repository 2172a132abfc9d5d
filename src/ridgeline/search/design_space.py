"""A space of designs: a base chip, what varies, and limits; read from a TOML file.

base = "ga100"
[vary]
cores = [32, 64, 128]
"core.array" = ["16x16", "32x32"]
memory = [{ kind = "hbm2e", channels = 6, channel_bandwidth = 409.6e9, bytes = 96e9 }]
[limit]
area_mm2 = 858
tpot_s = 0.1
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.catalog import chips, merged
from ridgeline.catalog.toml import parse
from ridgeline.spec.chip import Chip
from ridgeline.spec.errors import UserError, unknown

_TOP = ("base", "vary", "limit")
STATIC = ("area_mm2", "edge_mm", "watts", "dollars")
"""Limits that a design breaks or keeps whatever it computes."""
_FOLLOWS = {"cores_on_die": "cores", "cache_bytes_per_clock": "cores", "cache_bytes_on_die": "cache_bytes"}
"""Fields that keep their ratio to another one that varies, unless they vary themselves: each core keeps its port to
the buffer, and its share of spares."""
MOST = 200_000


@dataclass(frozen=True)
class Space:
    """Designs that differ from a base in the product of some choices, and what they must keep."""

    base: Chip
    document: dict[str, Any]
    """The base's own table."""
    vary: dict[str, list[Any]]
    """Dotted field of the chip → choices; a choice can be a table of several fields."""
    limits: dict[str, float]
    """By metric or by ``STATIC``: the most allowed (the least, for metrics of which more is better)."""

    @property
    def size(self) -> int:
        """Number of designs."""
        return math.prod(len(choices) for choices in self.vary.values())

    def designs(self) -> Iterator[tuple[Chip, str]]:
        """Every design, and its choices in words. Raises :class:`UserError` for one that is no chip."""
        for i, choice in enumerate(itertools.product(*self.vary.values()), 1):
            picked = dict(zip(self.vary, choice, strict=True))
            said = " ".join(f"{k}={_say(v)}" for k, v in picked.items())
            yield self._design(picked, f"{self.base.name}-{i:0{len(str(self.size))}d}", said), said

    def _design(self, picked: dict[str, Any], name: str, said: str) -> Chip:
        given: dict[str, Any] = {}
        for path, value in picked.items():
            _put(given, path.split("."), _array(value) if path.endswith("core.array") else value)
        base = {k: v for k, v in self.document.items() if k not in ("watts", "title", "source")}
        if "memory" in given and "kind" in given["memory"]:
            base.pop("memory")
        table = merged(base, given)
        for field, of in _FOLLOWS.items():
            if of in given and field not in given and field in base:
                scaled = base[field] * table[of] / base[of]
                table[field] = scaled if field == "cache_bytes_per_clock" else math.ceil(scaled)
        table |= {"name": name, "title": said, "source": f"a variation of {self.base.name}"}
        return chips.chip_from(table, f"design {said}")


def read_space(path: Path) -> Space:
    """The space of a TOML file. Raises :class:`UserError` naming what is wrong in it."""
    try:
        table = parse(path.read_bytes(), str(path))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}", "give a TOML file of a base, [vary] and [limit]") from None
    for key in table:
        if key not in _TOP:
            raise unknown("key", key, _TOP, str(path))
    base = table.get("base")
    if not isinstance(base, str):
        raise UserError(f"{path} has no base", f'name the chip to vary: base = "{chips.chips()[0]}"')
    if base.endswith(".toml") and not Path(base).is_absolute():  # beside the space's own file
        base = str(path.parent / base)
    vary = table.get("vary") or {}
    for field, choices in vary.items():
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{path}: vary {field!r} is not a list of choices", f'write "{field}" = [1, 2]')
    if not vary:
        raise UserError(f"{path} varies nothing", "list choices under [vary], such as cores = [64, 128]")
    limits = table.get("limit") or {}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(f"{path}: limit {name} = {value!r}", "give a number above zero, in SI units (mm² for area)")
    document, where = chips.chip_document(base)
    space = Space(chips.chip_from(document, where), document, vary, {k: float(v) for k, v in limits.items()})
    if space.size > MOST:
        raise UserError(f"{path} describes {space.size} designs", f"at most {MOST}: give fewer choices")
    return space


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
    last = path[-1]
    table[last] = {**table.get(last, {}), **value} if isinstance(value, dict) else value


def _array(value: Any) -> Any:
    """``"32x16"`` → 32 rows, 16 columns."""
    match = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    return {"rows": int(match[1]), "columns": int(match[2])} if match else value


def _say(value: Any) -> str:
    if isinstance(value, dict):
        kind, channels = value.get("kind"), value.get("channels")
        return f"{channels}x{kind}" if kind and channels else ",".join(f"{k}={v}" for k, v in value.items())
    return str(value)
