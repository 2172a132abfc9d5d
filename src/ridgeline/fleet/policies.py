"""Which server gets a request."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ridgeline.fleet.members import Member

PIECE = 128
"""Characters of a prompt in one link of its chain of hashes."""
MOST_PIECES = 1 << 16
"""Links that are remembered per member, the oldest forgotten first: 8 million characters."""
IMBALANCE = 4
"""Requests by which the member with the longest known prefix may be ahead of the least loaded one."""


class Policy(Protocol):
    """Chooses among members, at least one."""

    def choose(self, able: Sequence[Member], prompt: str) -> Member:
        """The member for a prompt."""

    def forget(self, member: Member) -> None:
        """A member was restarted: its cache is empty."""


class LeastLoaded:
    """The member with the fewest running requests; of several the one that was sent the fewest."""

    def choose(self, able: Sequence[Member], prompt: str) -> Member:
        """As :class:`Policy`."""
        return min(able, key=lambda m: (m.running, m.sent))

    def forget(self, member: Member) -> None:
        """Nothing is remembered."""


class Random:
    """Any member: what the others are compared with."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)

    def choose(self, able: Sequence[Member], prompt: str) -> Member:
        """As :class:`Policy`."""
        return self.draw.choice(able)

    def forget(self, member: Member) -> None:
        """Nothing is remembered."""


class PrefixAware:
    """The member that was sent the longest beginning of the prompt before, unless it is far busier than another: its
    prefix cache has it, most likely (SGLang's cache-aware routing, arXiv:2312.07104, section 3). What the caches have
    evicted meanwhile is not known here."""

    def __init__(self, imbalance: int = IMBALANCE) -> None:
        self.imbalance = imbalance
        self.known: dict[Member, OrderedDict[bytes, None]] = {}
        self.fallback = LeastLoaded()

    def choose(self, able: Sequence[Member], prompt: str) -> Member:
        """As :class:`Policy`."""
        chain = links(prompt)
        least = self.fallback.choose(able, prompt)
        near = [m for m in able if m.running <= least.running + self.imbalance]
        found = {m: self._matched(m, chain) for m in near}
        most = max(found.values())
        chosen = self.fallback.choose([m for m in near if found[m] == most], prompt) if most else least
        self._remember(chosen, chain)
        return chosen

    def forget(self, member: Member) -> None:
        """As :class:`Policy`."""
        self.known.pop(member, None)

    def _matched(self, member: Member, chain: Sequence[bytes]) -> int:
        known = self.known.get(member, OrderedDict())
        return next((i for i, link in enumerate(chain) if link not in known), len(chain))

    def _remember(self, member: Member, chain: Sequence[bytes]) -> None:
        known = self.known.setdefault(member, OrderedDict())
        for link in reversed(chain):  # so that beginnings are forgotten last
            known[link] = None
            known.move_to_end(link)
        while len(known) > MOST_PIECES:
            known.popitem(last=False)


def links(prompt: str) -> list[bytes]:
    """Chained hashes of a prompt's whole pieces."""
    out: list[bytes] = []
    link = b""
    for start in range(0, len(prompt) - PIECE + 1, PIECE):
        link = hashlib.blake2b(
            link + prompt[start : start + PIECE].encode(errors="surrogatepass"), digest_size=8
        ).digest()
        out.append(link)
    return out


POLICIES = {"prefix": PrefixAware, "least-loaded": LeastLoaded, "random": Random}
