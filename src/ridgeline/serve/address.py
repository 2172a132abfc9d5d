"""Addresses that servers listen on, and what comes before their paths."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from ridgeline.spec.errors import UserError


def loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_free(host: str, port: int) -> None:
    """Raise :class:`UserError` where a server cannot listen on ``port`` (0: any) of ``host``."""
    try:
        with socket.create_server((host, port), family=_family(host), reuse_port=False):
            pass
    except OSError as e:
        raise UserError(f"cannot listen on {host}:{port}: {e.strerror}", "choose another --port or --host") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def path_prefix(root_path: str) -> str:
    """A prefix of paths without a slash at its end. Raises :class:`UserError` for one without one at its beginning."""
    root_path = root_path.rstrip("/")
    if root_path and not root_path.startswith("/"):
        raise UserError(f"--root-path {root_path!r} does not begin with a slash", f"give /{root_path}")
    return root_path


class Address(NamedTuple):
    """Where a server is, with the port that its scheme stands for."""

    scheme: str
    host: str
    port: int
    path: str


def server_addresses(urls: Iterable[str], encrypted: bool = False) -> list[Address]:
    """The addresses of servers. ``encrypted``: all must be.

    Raises :class:`UserError` for one that is none, and for a server that is listed twice.
    """
    found: list[Address] = []
    for url in urls:
        address, what = _address(url), ""
        if address is None:
            what = "not an address"
        elif encrypted and address.scheme == "http":
            what = "not encrypted, and this machine has certificates"
        elif address in found:
            what = "listed twice"
        if address is None or what:
            raise UserError(f"{url!r} is {what}", "list each server once, as in https://10.0.0.6:8001")
        found.append(address)
    return found


def _address(url: str) -> Address | None:
    """The address in a server's ``url``; None where it is not one, or names more than a server and a path."""
    try:
        parts = urlsplit(url)
        port = {"http": 80, "https": 443}[parts.scheme] if parts.port is None else parts.port
    except (ValueError, KeyError):
        return None
    further = parts.username is not None or any(c in " ?#" for c in url) or not url.isprintable()
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or further:
        return None
    return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))
