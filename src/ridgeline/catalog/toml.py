"""TOML → spec objects, with errors that name the file, the key and the nearest key that would have worked."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ridgeline.spec.device import Device, DType
from ridgeline.spec.errors import UserError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", bound=BaseModel)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The document in ``data``. Raises :class:`UserError` naming ``where`` and the line when it is not TOML."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{where} is not valid TOML: {e}", "correct it there") from None


def validate(kind: type[T], data: dict[str, Any], where: str) -> T:
    """``data`` as a ``kind``: strictly typed (no number in quotes), no key unknown, none missing.

    Raises :class:`UserError` for the first error: which key of ``where``, and what it should be.
    """
    try:
        return kind.model_validate(data, strict=True)
    except ValidationError as e:
        # A misspelled key is both unknown and missing: the unknown one is more helpful.
        error = min(e.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        raise unknown("key", ".".join(path), _keys_beside(kind, path), where)
    if error["type"] == "missing":
        raise UserError(f"{where} has no key {'.'.join(path)!r}", "add it")
    if not path:
        raise UserError(f"{where} is not consistent: {error['msg'].removeprefix('Value error, ')}")
    got = "" if isinstance(error["input"], dict) else f", not {error['input']!r}"
    said = _lower(error["msg"].removeprefix("Value error, "))
    raise UserError(f"key {'.'.join(path)!r} in {where}: {said}{got}", "correct the value")


def device_from(data: dict[str, Any], where: str) -> Device:
    """``data`` as a Device whose rates are usable: known dtypes, finite and positive peaks, memory and bandwidths."""
    device = validate(Device, data, where)
    for dtype in device.peak_flops:
        if dtype not in get_args(DType):
            raise unknown("dtype", dtype, get_args(DType), f"{where}, table 'peak_flops'")
    if not device.peak_flops:
        raise UserError(f"table 'peak_flops' in {where} is empty", "give at least one dense peak, such as fp32 = 1e12")
    positive = {f"peak_flops.{k}": v for k, v in device.peak_flops.items()}
    positive |= {"memory_bytes": device.memory_bytes, "memory_bandwidth": device.memory_bandwidth}
    zero_or_more = {
        k: getattr(device, k)
        for k in ("l2_bytes", "sm_count", "clock", "launch_latency", "reserved_bytes", "watts", "price_per_hour")
    }
    for field in ("link", "host_link", "network", "disk"):
        if (link := getattr(device, field)) is not None:
            positive[f"{field}.bandwidth"] = link.bandwidth
            zero_or_more[f"{field}.latency"] = link.latency
    if device.host is not None:
        positive["host.memory_bytes"] = device.host.memory_bytes
        if device.host.memory_bandwidth is not None:
            positive["host.memory_bandwidth"] = device.host.memory_bandwidth
    for key, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"key {key!r} in {where} is {value}", "give a finite number above zero, in SI units")
    for key, value in zero_or_more.items():
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"key {key!r} in {where} is {value}", "give a finite number, 0 or above, in SI units")
    return device


def _keys_beside(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The valid keys of the table that ``path``'s last key stands in, each written in full."""
    table: Any = kind
    for part in path[:-1]:
        field = table.model_fields.get(part) if _is_model(table) else None
        # `link` is `Link | None`; `rates` is `dict[str, Rate]`, whose next part is the entry's own name.
        table = next((t for t in _flatten(field.annotation) if _is_model(t)), None) if field else table
    names = list(table.model_fields) if _is_model(table) else []
    prefix = ".".join(path[:-1])
    return [f"{prefix}.{name}" if prefix else name for name in names]


def _flatten(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [annotation] if not inner else [t for a in inner for t in _flatten(a)]


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
