"""The secret that the machines of a fleet share: keys made of it, and addresses signed with it. Needs no torch."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from ridgeline.spec.errors import UserError

VARIABLE = "RIDGELINE_FLEET_SECRET"
HEADER = "X-Ridgeline-Prefill"
"""Header in which a router names the prefill server of a request: its address, and the address signed."""
SHORTEST = 16
"""Bytes of a secret at least."""


def read_secret(file: Path | None, variable: str | None) -> bytes:
    """The secret of a file, or else of the environment's ``variable``; empty: there is none. Raises
    :class:`UserError` for one that can be guessed."""
    if file is not None:
        try:
            secret = file.read_bytes().strip()
        except OSError as e:
            raise UserError(f"the fleet's secret {file} cannot be read: {e.strerror}", "give a file that can") from None
    else:
        secret = (variable or "").encode().strip()
    if (file is not None or secret) and len(secret) < SHORTEST:
        where = str(file) if file is not None else VARIABLE
        what = f"the fleet's secret in {where} has {len(secret)} bytes, of {SHORTEST} at least"
        raise UserError(what, "make one with `openssl rand -hex 32`")
    return secret


def require_secret(role: str, secret: bytes) -> None:
    """Raise :class:`UserError` for an empty secret."""
    if not secret:
        raise UserError(f"a server of role {role} sends caches to whoever knows the fleet's secret, and there is none",
                        f"give --fleet-secret-file FILE, or set {VARIABLE}")  # fmt: skip


def derive(secret: bytes, *parts: bytes) -> bytes:
    """A key for one purpose, from the shared secret."""
    return hmac.digest(secret, b"\0".join(hashlib.sha256(p).digest() for p in parts), "sha256")


def signed(secret: bytes, address: str) -> str:
    """The header's value for the prefill server at ``address`` (host:port)."""
    return f"{address} {derive(secret, b'address', address.encode()).hex()}"


def verified(secret: bytes, value: str) -> str | None:
    """The address in a header's value; None unless a router that knows the secret wrote it."""
    address, _, tag = value.strip().rpartition(" ")
    own = derive(secret, b"address", address.encode(errors="replace")).hex()
    return address if hmac.compare_digest(own.encode(), tag.encode(errors="replace")) else None
