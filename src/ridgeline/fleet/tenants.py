"""Who may ask how much: API keys with limits of requests."""

from __future__ import annotations

import hmac
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ridgeline.spec.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass
class Tenant:
    """One customer of a fleet."""

    name: str
    key: str
    requests_per_minute: float | None = None
    """Mean rate; a minute's worth may come at once. None: any."""
    concurrency: int | None = None
    """Largest number of requests at a time; None: any."""
    running: int = 0
    tokens: float = field(default=0.0, repr=False)
    filled: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self.tokens = self.requests_per_minute or 0.0


def load_tenants(path: Path) -> list[Tenant]:
    """The tenants of a TOML file. Raises :class:`UserError` naming what is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", "give a TOML file of tenants") from None
    except ValueError as e:
        raise UserError(f"{path} is not valid TOML: {e}") from None
    if "tenants" not in tables:
        raise UserError(f"{path} has no tenants", "write [tenants.NAME]; see docs/fleet.md")
    return tenants_of(tables["tenants"], path)


def tenants_of(tables: Any, path: Path) -> list[Tenant]:
    """The tenants of tables ``[tenants.NAME]`` with ``key``, ``requests_per_minute`` and ``concurrency``. Raises
    :class:`UserError` naming what is wrong."""
    try:
        found = [TypeAdapter(Tenant).validate_python({"name": name, **table}) for name, table in tables.items()]
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}", "see docs/fleet.md") from None
    except (AttributeError, TypeError):
        raise UserError(f"{path}: tenants are tables", "write [tenants.NAME]; see docs/fleet.md") from None
    if any(not t.key for t in found) or len({t.key for t in found}) < len(found):
        raise UserError(f"{path}: keys must be there and differ", "give every tenant a key of its own")
    return found


class Tenants:
    """The tenants of a fleet; without any everybody is let in."""

    def __init__(self, tenants: Iterable[Tenant] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.all = list(tenants)
        self.clock = clock

    def find(self, authorization: str) -> Tenant | None:
        """Whose key an ``Authorization`` header brings."""
        given = authorization.removeprefix("Bearer ").encode()
        found = [t for t in self.all if hmac.compare_digest(t.key.encode(), given)]
        return found[0] if found else None

    def refusal(self, tenant: Tenant) -> tuple[str, float] | None:
        """Why one more request must wait, and for how many seconds; None: it is let in, and counted."""
        if tenant.concurrency is not None and tenant.running >= tenant.concurrency:
            return f"{tenant.running} requests of {tenant.name} are running, of {tenant.concurrency} at a time", 1.0
        if (rate := tenant.requests_per_minute) is not None:
            now = self.clock()
            if tenant.filled:
                tenant.tokens = min(rate, tenant.tokens + (now - tenant.filled) * rate / 60)
            tenant.filled = now
            if tenant.tokens < 1:
                return f"{tenant.name} has sent its {rate:g} requests of this minute", (1 - tenant.tokens) * 60 / rate
            tenant.tokens -= 1
        tenant.running += 1
        return None
