"""Who may ask how much: API keys with limits of requests."""

from __future__ import annotations

import hmac
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline.spec.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TenantTable(BaseModel):
    """``[tenants.NAME]`` of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: str = Field(min_length=1)
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Mean rate; a minute's worth may come at once. None: any."""
    concurrency: int | None = Field(default=None, ge=1)
    """Largest number of requests at a time; None: any."""


class Tenant:
    """One customer of a fleet, and what it has used."""

    def __init__(self, name: str, key: str, **limits: Any) -> None:
        self.name, self.key, table = name, key, TenantTable(key=key, **limits)
        self.requests_per_minute, self.concurrency = table.requests_per_minute, table.concurrency
        self.running = 0
        self.tokens, self.filled = self.burst, 0.0

    @property
    def burst(self) -> float:
        """Number of requests that may come at once."""
        return max(1.0, self.requests_per_minute or 0.0)


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
        found = [Tenant(name, **TenantTable.model_validate(table).model_dump()) for name, table in tables.items()]
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}", "see docs/fleet.md") from None
    except (AttributeError, TypeError):
        raise UserError(f"{path}: tenants are tables", "write [tenants.NAME]; see docs/fleet.md") from None
    if len({t.key for t in found}) < len(found):
        raise UserError(f"{path}: two tenants have the same key", "give every tenant a key of its own")
    return found


class Tenants:
    """The tenants of a fleet; without any everybody is let in."""

    def __init__(self, tenants: Iterable[Tenant] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.all = list(tenants)
        self.clock = clock

    def find(self, key: bytes) -> Tenant | None:
        """The tenant with this key; None: there is none."""
        found = [t for t in self.all if hmac.compare_digest(t.key.encode(), key)]
        return found[0] if found else None

    def refusal(self, tenant: Tenant) -> tuple[str, float] | None:
        """Why one more request must wait, and for how many seconds; None: it is let in, and counted."""
        if tenant.concurrency is not None and tenant.running >= tenant.concurrency:
            return f"{tenant.running} requests of {tenant.name} are running, of {tenant.concurrency} at a time", 1.0
        if (rate := tenant.requests_per_minute) is not None:
            now = self.clock()
            if tenant.filled:
                tenant.tokens = min(tenant.burst, tenant.tokens + (now - tenant.filled) * rate / 60)
            tenant.filled = now
            if tenant.tokens < 1:
                return f"{tenant.name} has sent its {rate:g} requests of this minute", (1 - tenant.tokens) * 60 / rate
            tenant.tokens -= 1
        tenant.running += 1
        return None
