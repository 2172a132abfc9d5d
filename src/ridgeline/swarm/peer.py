"""What every peer of a swarm does, whatever it computes: it listens, announces itself, and hears of others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ridgeline.serve.transfer.connection import Lost
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError
from ridgeline.spec.wire import Wire
from ridgeline.swarm.announcements import Announcement, Table
from ridgeline.swarm.link import Answer, Links, Listener, Refused, Shape
from ridgeline.swarm.policies import Span

FIRST = 30.0
"""Seconds that a peer tries to reach those that it was given."""
ASKED = 3
"""Peers with whom announcements are exchanged each time."""


class Peer:
    """One peer. Methods are for the event loop's thread."""

    def __init__(
        self, identity: str, blocks: int, secret: bytes, announce_every: float, say: Callable[[str], None],
        join: tuple[str, ...] = (), shape: Shape | None = None, tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``blocks``: of the model. ``join``: addresses of peers that are known already."""
        self.announce_every, self.say, self.join = announce_every, say, join
        self.peer = secrets.token_hex(8)
        self.table = Table(blocks, 4 * announce_every)
        self.address = ""
        self.rng = random.Random(self.peer)
        self.links = Links(self.peer, secret, identity, shape, tls)
        self.listener = Listener(secret, identity, self._handle, self.gone, say, tls)
        self.tasks: list[asyncio.Task[None]] = []
        self.stopped = self.ready = False
        """Whether it has loaded what it computes."""
        self._number, self._why = 0, ""

    # ---- what peers of a kind do -------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """The fields of its announcement that depend on what it computes."""
        raise NotImplementedError

    async def answer(self, owner: str, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """Answer a question of the connection ``owner``. May raise :class:`Refused` or :class:`BadPeer`."""
        raise NotImplementedError

    def gone(self, owner: str) -> None:
        """A connection is over."""

    async def prepare(self) -> None:
        """Load what is computed; others' announcements are known."""
        raise NotImplementedError

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, reach: str = "") -> str:
        """Join the swarm → the address. ``reach``: host by which others reach this one, if not ``host``."""
        port = await self.listener.listen(host, port)
        self.address = f"{reach or host}:{port}"
        await self._find()
        await self.prepare()
        self.ready = True
        await self.announce()
        self.tasks.append(asyncio.create_task(self._keep_announcing()))
        return self.address

    async def _find(self) -> None:
        """Hear of others through those that were given. Raises :class:`UserError` when none answers for a while."""
        others = tuple(address for address in self.join if address != self.address)
        deadline = time.monotonic() + FIRST
        while others and not await self.gossip(others):
            if time.monotonic() > deadline:
                await self.listener.close()
                raise UserError(f"no peer of the swarm answers at {', '.join(others)}: {self._why}",
                                "give the address of one that runs, with its secret and certificates")  # fmt: skip
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """Tell the others, and end."""
        self.stopped = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.ready:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.announce(left=True), 2.0)
        await self.links.close()
        await self.listener.close()

    def spans(self) -> list[Span]:
        """All servers, as policies see them."""
        return [Span(a.peer, a.start, a.stop, a.throughput) for a in self.table.live()]

    async def announce(self, left: bool = False) -> None:
        """Say what there is now, to this peer's table and to some others."""
        self.note(left)
        await self.gossip()

    def note(self, left: bool = False) -> None:
        """Put a new announcement into this peer's own table."""
        self._number += 1
        self.table.put(
            Announcement(
                peer=self.peer,
                number=self._number,
                address=self.address,
                left=left,
                refused=self.listener.refused,
                **self.record(),
            )
        )

    async def _keep_announcing(self) -> None:
        while not self.stopped:
            await asyncio.sleep(self.announce_every * self.rng.uniform(0.5, 1.0))
            await self.announce()

    async def gossip(self, addresses: tuple[str, ...] = ()) -> bool:
        """Exchange announcements with peers, those at ``addresses`` or some that are known → whether any answered."""
        known = [a.address for a in self.table.live() if a.peer != self.peer]
        # One that was given, too: after a split, the halves know of each other through no announcement any more.
        given = (self.rng.choice(self.join),) if self.join else ()
        chosen = dict.fromkeys(addresses or (*self.rng.sample(known, min(ASKED, len(known))), *given))
        found = await asyncio.gather(*(self._exchange(address) for address in chosen if address != self.address))
        return any(found)

    async def _exchange(self, address: str) -> bool:
        try:
            # A peer that hangs must not keep this one from announcing itself again in time.
            asked = asyncio.create_task(self.links.ask(address, "table", {"table": self.table.share()}))
            asked.add_done_callback(lambda t: t.cancelled() or t.exception())  # it may be given up
            await asyncio.wait({asked}, timeout=2 * self.announce_every)
            if not asked.done():
                asked.cancel()
                raise Lost("it is too slow")
            self.table.merge(asked.result().message.get("table"))
            return True
        except BadPeer as e:
            self._why = str(e)
            self.say(f"peer {address} refused: {e}")
        except (Lost, Refused) as e:  # its announcement will expire
            self._why = str(e)
        return False

    async def _handle(self, owner: str, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        if op == "table":
            self.table.merge(m.get("table", []))
            return Answer({"table": self.table.share()})
        if op == "ping":
            return Answer()
        if not self.ready:
            raise Refused("it is still loading")
        return await self.answer(owner, op, m, tensors)


def number(m: dict[str, Any], name: str) -> int:
    """A count in a message. Raises :class:`BadPeer`."""
    value = m.get(name)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise BadPeer(f"it sent {value!r} as {name}"[:200])
    return value


def text(m: dict[str, Any], name: str) -> str:
    """A short text in a message. Raises :class:`BadPeer`."""
    value = m.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise BadPeer(f"it sent no {name}")
    return value


def wire_of(m: dict[str, Any]) -> Wire:
    """The format of a message's activations. Raises :class:`BadPeer`."""
    if m.get("wire") == "plain":
        return "plain"
    if m.get("wire") == "blockwise8":
        return "blockwise8"
    raise BadPeer("it asked for an unknown format of activations")
