"""Plan: an ordered set of technique calls, as names and options. Pure data; the registry gives them meaning."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ridgeline.spec.errors import UserError

Scalar = str | int | float | bool | list[str]


class Call(BaseModel):
    """One enabled technique: its name and its options. Written ``zero:stage=3,degree=2``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    options: dict[str, Any] = {}

    @classmethod
    def parse(cls, text: str) -> Call:
        """Read ``name``, or ``name:option=value,option=value``. Raises :class:`UserError` on a malformed option."""
        name, _, tail = text.strip().partition(":")
        options: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in tail.split(","))):
            key, eq, value = item.partition("=")
            if not eq or not key:
                raise UserError(f"{text!r}: {item!r} is not option=value", f"write it like {name}:{item}=VALUE")
            if key.strip() in options:
                raise UserError(f"{text!r}: option {key.strip()!r} is given twice", "give it once")
            options[key.strip()] = scalar(value.strip())
        if not name:
            raise UserError(f"{text!r} names no technique", "write NAME or NAME:option=value")
        return cls(name=name, options=options)

    def __str__(self) -> str:
        body = ",".join(f"{k}={_text(v)}" for k, v in self.options.items())
        return f"{self.name}:{body}" if body else self.name


class Plan(BaseModel):
    """The enabled techniques. At most one call per technique."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: tuple[Call, ...] = ()

    @classmethod
    def parse(cls, items: list[Any] | tuple[Any, ...], where: str = "plan") -> Plan:
        """From strings (``"zero:stage=3"``) or tables (``{technique = "zero", stage = 3}``)."""
        calls: list[Call] = []
        for item in items:
            if isinstance(item, str):
                call = Call.parse(item)
            elif isinstance(item, dict) and isinstance(item.get("technique"), str):
                rest = {k: v for k, v in item.items() if k != "technique"}
                call = Call(name=item["technique"], options=rest)
            else:
                raise UserError(
                    f"{where}: {item!r} is not a technique", 'write "zero:stage=3" or {technique = "zero", stage = 3}'
                )
            if any(call.name == c.name for c in calls):
                raise UserError(f"{where}: technique {call.name!r} is given twice", "give its options in one place")
            calls.append(call)
        return cls(calls=tuple(calls))

    def has(self, name: str) -> bool:
        """Whether the technique is enabled."""
        return any(c.name == name for c in self.calls)

    def option(self, name: str, key: str) -> Any:
        """The value of one option of an enabled technique; None if it is not enabled."""
        return next((c.options.get(key) for c in self.calls if c.name == name), None)

    def strings(self) -> list[str]:
        """The calls in ``name:option=value`` form."""
        return [str(c) for c in self.calls]


def scalar(text: str) -> Scalar:
    """A command-line value: int, float, bool, ``4k`` (4096), ``a+b`` as a list, else a string."""
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if low.endswith("k") and low[:-1].isdigit():
        return int(low[:-1]) * 1024
    if "+" in text:
        return [part for part in text.split("+") if part]
    return text


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "+".join(str(v) for v in value)
    return str(value)
