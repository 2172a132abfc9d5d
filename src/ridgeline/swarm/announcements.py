"""Who serves what: announcements that expire, spread from peer to peer.

Every peer keeps a table and exchanges it with a few others (gossip). A record carries the seconds that it is still
valid instead of a time of day, so that clocks may differ. A small table needs no distributed hash table: 10 000 servers
are 4 MB, and unlike the records of a public one, these come only from peers that know the secret.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ridgeline.serve.transfer.frames import BadPeer

MOST = 10_000
"""Servers that a table holds at most."""
Name = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class Announcement(BaseModel):
    """What a server says about itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    peer: Name
    """Drawn anew whenever a server starts."""
    number: int = Field(ge=0)
    """Of a server's announcements the one with the highest number counts."""
    address: str = Field(pattern=r"^[^\s]{1,200}:\d{1,5}$")
    start: int = Field(ge=0)
    """First block."""
    stop: int
    """The block behind the last."""
    weights: list[Name]
    """Hash of each block's weights."""
    plan: str = Field(default="", max_length=200)
    """Technique that changed the weights since (``smooth_int8``)."""
    trains: bool = True
    """Whether it computes gradients."""
    throughput: float = Field(gt=0)
    """Tokens/s through all of its blocks."""
    running: int = Field(default=0, ge=0)
    """Sequences that it holds."""
    room: int = Field(default=0, ge=0)
    """Tokens that its cache still has room for."""
    step: int = Field(default=-1, ge=-1)
    """Steps that its weights were trained; -1: it serves fixed ones."""
    refused: int = Field(default=0, ge=0)
    """Peers that broke the rules, and that it keeps or kept out."""
    left: bool = False
    """Whether it has gone."""

    @model_validator(mode="after")
    def _whole(self) -> Announcement:
        if not 0 < self.stop - self.start == len(self.weights):
            raise ValueError("as many hashes as blocks are due")
        return self


class Table:
    """Announcements by peer, as long as they are valid. For one thread."""

    def __init__(self, blocks: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``blocks``: of the model. ``ttl``: seconds that a record is valid at most."""
        self.blocks, self.ttl, self.clock = blocks, ttl, clock
        self._known: dict[str, tuple[Announcement, float]] = {}

    def put(self, a: Announcement, ttl: float | None = None) -> None:
        """Keep an announcement, unless a newer one of the same peer is known. One that is known already does not live
        longer for being told again."""
        self._expire()
        old = self._known.get(a.peer)
        if a.stop > self.blocks or (old and old[0].number >= a.number) or (not old and len(self._known) >= MOST):
            return
        left = self.ttl if ttl is None else min(ttl, self.ttl)
        if left > 0:
            self._known[a.peer] = a, self.clock() + left

    def live(self) -> list[Announcement]:
        """The servers that are there."""
        self._expire()
        return [a for a, _ in self._known.values() if not a.left]

    def get(self, peer: str) -> Announcement | None:
        """A server's announcement, if it is there."""
        found = self._known.get(peer)
        return found[0] if found and not found[0].left and found[1] > self.clock() else None

    def share(self) -> list[dict[str, Any]]:
        """All records, as another peer takes them."""
        self._expire()
        now = self.clock()
        return [{"ttl": until - now, "record": a.model_dump()} for a, until in self._known.values()]

    def merge(self, records: Any) -> None:
        """Take what another peer shared. Raises :class:`BadPeer` for what is none."""
        if not isinstance(records, list) or len(records) > MOST:
            raise BadPeer("it shared announcements that are none")
        for r in records:
            try:
                a, ttl = Announcement.model_validate(r["record"]), float(r["ttl"])
            except (ValidationError, KeyError, TypeError, ValueError):
                raise BadPeer("it shared an announcement that is none") from None
            if ttl == ttl:
                self.put(a, ttl)

    def forget(self, peers: Iterable[str]) -> None:
        """Drop records."""
        for peer in peers:
            self._known.pop(peer, None)

    def _expire(self) -> None:
        now = self.clock()
        self._known = {p: (a, until) for p, (a, until) in self._known.items() if until > now}
