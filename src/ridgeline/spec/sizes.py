"""Human-readable sizes in bytes: ``200MB`` (10⁶), ``2GiB`` (2³⁰), or a plain number of bytes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
MOST = 2**63
"""Bytes that no machine has."""
_WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: Any) -> int:
    """Bytes of ``200MB``, ``1.5 GiB``, ``4096`` or a number. Raises :class:`ValueError` for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    else:
        found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
        units = {name.lower(): factor for name, factor in UNITS.items()}
        known = found is not None and found[2].lower() in units
        size = float(found[1]) * units[found[2].lower()] if found and known else math.nan
    if not -MOST <= size <= MOST:  # nor not a number
        raise ValueError("write a size such as 200MB, 2GB or 1.5GiB")
    return int(size)


def say_size(count: float) -> str:
    """Bytes for a message, in powers of ten: 1.23 GB."""
    for power, prefix in reversed(list(enumerate("KMGT", start=1))):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {prefix if prefix != 'K' else 'k'}B"
    return f"{count:.0f} B"


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
"""A positive option in bytes that may be written with a unit."""
