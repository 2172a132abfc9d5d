"""Chips, processes, interfaces and prices by name.

``chip("ga100")`` reads ``catalog/chips/ga100.toml``, or a chip TOML file by its path. A chip's file can be ``like``
another: it then gives what differs, table by table.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.catalog.toml import parse, validate
from ridgeline.spec.chip import Chip, Interface, Prices, Process
from ridgeline.spec.errors import UserError, unknown


@cache
def chips() -> tuple[str, ...]:
    """The names of all catalog chips, sorted."""
    found = (f.name for f in (files(__package__) / "chips").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def chip(name: str) -> Chip:
    """A catalog chip, or that of a chip TOML file. Raises :class:`UserError` for an unknown name or a bad file."""
    document, where = chip_document(name)
    return chip_from(document, where)


def chip_from(document: dict[str, Any], where: str) -> Chip:
    """A chip whose process and interfaces the catalog knows."""
    found = validate(Chip, document, where)
    process(found.process)
    interface(found.memory.kind)
    if found.links is not None:
        interface(found.links.kind)
    return found


def chip_document(name: str) -> tuple[dict[str, Any], str]:
    """A chip's file with what it is ``like`` filled in, and what to call it in messages."""
    from ridgeline.catalog import merged

    low = name.strip().lower()
    if low in chips():
        file = files(__package__) / "chips" / f"{low}.toml"
        return parse(file.read_bytes(), file.name), file.name
    if not name.endswith(".toml"):
        raise unknown("chip", name, chips(), "the catalog (a chip file's name ends with .toml)")
    path = Path(name).expanduser()
    try:
        document = {"name": path.stem, **parse(path.read_bytes(), str(path))}
    except OSError as e:
        raise UserError(f"cannot read chip file {path}: {e.strerror}", "give a chip TOML file") from None
    like = document.pop("like", "")
    return (merged(chip_document(like)[0], document) if like else document), str(path)


def is_chip(document: dict[str, Any]) -> bool:
    """Whether a TOML document describes a chip, not a device."""
    return "like" in document or "core" in document


@cache
def _silicon(kind: str) -> dict[str, dict[str, Any]]:
    file = files(__package__) / "silicon" / f"{kind}.toml"
    return parse(file.read_bytes(), file.name)


@cache
def process(name: str) -> Process:
    """One manufacturing process. Raises :class:`UserError` for an unknown one."""
    if name not in _silicon("processes"):
        raise unknown("process", name, _silicon("processes"))
    return validate(Process, _silicon("processes")[name], f"processes.toml, {name}")


@cache
def interface(kind: str) -> Interface:
    """One kind of memory or link interface. Raises :class:`UserError` for an unknown one."""
    if kind not in _silicon("interfaces"):
        raise unknown("interface", kind, _silicon("interfaces"))
    return validate(Interface, _silicon("interfaces")[kind], f"interfaces.toml, {kind}")


def price_dates() -> list[str]:
    """The dates of the catalog's prices."""
    return list(_silicon("prices"))


def prices(date: str) -> Prices:
    """The prices of one date, or of a TOML file. Raises :class:`UserError` for an unknown date."""
    if date.endswith(".toml"):
        path = Path(date).expanduser()
        try:
            return validate(Prices, {"date": path.stem, **parse(path.read_bytes(), date)}, date)
        except OSError as e:
            raise UserError(f"cannot read price file {path}: {e.strerror}", "give a TOML file of prices") from None
    if date not in _silicon("prices"):
        raise unknown("price date", date, price_dates())
    return validate(Prices, _silicon("prices")[date], f"prices.toml, {date}")
