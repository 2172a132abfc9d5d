"""Addresses that servers listen on, and what comes before their paths."""

from __future__ import annotations

import ipaddress

from ridgeline.spec.errors import UserError


def loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def path_prefix(root_path: str) -> str:
    """A prefix of paths without a slash at its end. Raises :class:`UserError` for one without one at its beginning."""
    root_path = root_path.rstrip("/")
    if root_path and not root_path.startswith("/"):
        raise UserError(f"--root-path {root_path!r} does not begin with a slash", f"give /{root_path}")
    return root_path
