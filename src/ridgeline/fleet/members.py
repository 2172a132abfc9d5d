"""The servers of a fleet: what is known of each, and how that is found out."""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import aiohttp

EVERY = 1.0
"""Seconds between two looks at a member's health."""
PATIENCE = 5.0
"""Seconds after which a health check without an answer has failed."""
PLAIN = {"Accept-Encoding": "identity"}
ROLES = ("prefill", "decode", "mixed")
FAILURES = 2
"""Failed health checks in a row after which a member is down; a refused connection is enough."""


@dataclass(eq=False)
class Member:
    """One server."""

    url: str
    state: Literal["unknown", "up", "draining", "down"] = "unknown"
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Models and adapters as it lists them, by name."""
    running: int = 0
    """Requests of this router that it is answering."""
    sent: int = 0
    """Requests that were forwarded to it, repeated ones too."""
    failed: int = 0
    """Those of them that it did not answer."""
    missed: int = 0
    """Failed health checks in a row."""
    role: str = ""
    """What it is for: prefill, decode or mixed; empty: it sends and receives no caches of prompts."""
    lent: bool = False
    """Whether it does the other kind of work, too, for now."""
    source: str = ""
    """Address (host:port) where other servers fetch the caches of prompts."""
    fingerprint: str = ""
    """Equal for servers whose caches are the same."""
    queued_tokens: int = 0
    """Prompt tokens that it has to compute, by its last account, and about those that it was sent since."""
    most_tokens: int = 1
    """Tokens of one of its steps."""
    sequences: int = 0
    """Sequences that it has, in the same way."""
    most_sequences: int = 1
    """Sequences of one of its steps."""
    tls: ssl.SSLContext | Literal[True] = True
    """How its certificate is checked; True: as the system does."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is down: what it has not answered is asked of another."""

    def become(self, state: Literal["up", "draining", "down"]) -> bool:
        """Change the state; returns whether it was another."""
        before, self.state = self.state, state
        self.lost.set() if state == "down" else self.lost.clear()
        return before != state


class Members:
    """All servers of a fleet, and the task that watches them. ``say`` gets a line per change; ``key`` is the API key
    that the members themselves ask for, instead of the clients'."""

    def __init__(self, urls: Iterable[str], say: Callable[[str], None] = lambda _: None, key: str = "") -> None:
        self.all = [Member(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self.say = say
        self.key = key
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def find(self, url: str) -> Member | None:
        """The member at an address."""
        return next((m for m in self.all if m.url == url.rstrip("/")), None)

    def able(self, model: str | None) -> list[Member]:
        """Members that take new requests for a model or adapter; None: for any."""
        up = [m for m in self.all if m.state == "up"]
        return [m for m in up if model is None or model in m.models]

    def listing(self, model: str | None) -> list[Member]:
        """Members that were seen to list a model, in whatever state they are."""
        return [m for m in self.all if model is not None and model in m.models]

    def lose(self, member: Member, why: str) -> None:
        """A member refused a connection or broke one: it gets nothing more until it is healthy again."""
        if member.state != "draining" and member.become("down"):
            self.say(f"{member.url} is down: {why}")

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Look at every member again and again, until cancelled."""

        async def look(member: Member) -> None:
            while True:
                await self.look(session, member)
                await asyncio.sleep(EVERY)

        await asyncio.gather(*(look(m) for m in self.all))

    async def look(self, session: aiohttp.ClientSession, member: Member) -> None:
        """Whether a member is healthy, and what it serves."""
        get = partial(session.get, headers=self.headers | PLAIN, timeout=aiohttp.ClientTimeout(total=PATIENCE),
                      ssl=member.tls)  # fmt: skip
        try:
            async with get(f"{member.url}/health") as answer:
                answer.raise_for_status()
            async with get(f"{member.url}/v1/models") as answer:
                answer.raise_for_status()
                member.models = {str(m["id"]): dict(m) for m in (await answer.json())["data"]}
            async with get(f"{member.url}/fleet-member") as answer:
                _describe(member, await answer.json() if answer.status == 200 else None)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as e:
            member.missed += 1
            if member.missed >= FAILURES or isinstance(e, aiohttp.ClientConnectorError):
                self.lose(member, str(e) or type(e).__name__)
            return
        member.missed = 0
        if member.state != "draining" and member.become("up"):
            self.say(f"{member.url} is up: {', '.join(sorted(member.models))}")


def _describe(member: Member, said: Any) -> None:
    """Note what a server says of its place in the fleet. Raises :class:`ValueError`, ``TypeError`` or ``KeyError``."""
    if said is None:
        member.role = member.source = ""
        member.sequences, member.queued_tokens = member.running, 0
        return
    numbers = [int(said[k]) for k in ("port", "queued_tokens", "most_tokens", "sequences", "most_sequences")]
    if said["role"] not in ROLES:
        raise ValueError(f"it has the role {said['role']!r}")
    host = urllib.parse.urlsplit(member.url).hostname or ""
    member.role, member.fingerprint = said["role"], str(said["fingerprint"])
    member.source = f"{f'[{host}]' if ':' in host else host}:{numbers[0]}"
    member.queued_tokens, member.most_tokens, member.sequences, member.most_sequences = numbers[1:]
