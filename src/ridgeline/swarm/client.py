"""A client's view of a swarm: who is there, which way to take, and whom to avoid."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeline.serve.transfer.connection import LoopThread, Lost
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.wire import Wire
from ridgeline.swarm.announcements import Announcement, Table
from ridgeline.swarm.link import BAN, TROUBLE, Answer, Links, Refused, Shape
from ridgeline.swarm.policies import Hop, Span, find_route
from ridgeline.swarm.span import block_hashes, identity, load_blocks
from ridgeline.swarm.wire import decode_rows

T = TypeVar("T")
AVOID = 5.0
"""Seconds that a server is avoided that could not be reached or said no."""
FRESH = 3.0
"""Seconds after which announcements are asked for again before a new way is chosen."""
PENALTY = 10.0
"""Seconds that a route counts more for a server without room for the sequence."""


class Swarm:
    """Servers of one model, seen by one client. Its methods may be called from any thread."""

    def __init__(
        self, path: Path, join: tuple[str, ...], secret: bytes, say: Callable[[str], None], wire: Wire = "blockwise8",
        plan: str = "", shape: Shape | None = None, patience: float = 30.0, tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``path``: the checkpoint, for embedding and head, and for the hashes of its blocks. ``plan``: what servers
        may have stored the weights as. ``patience``: seconds for an answer, and for servers to come back. Raises
        :class:`UserError` when none of ``join`` (host:port) answers."""
        self.path, self.join, self.say, self.wire, self.plan, self.patience = path, join, say, wire, plan, patience
        self.spec = ModelSpec.from_path(path)
        if not self.spec.causal:
            raise UserError(f"{self.spec.name} is an encoder, which generates nothing", "use a decoder")
        self.table = Table(self.spec.num_layers, 3600.0)
        self.banned: dict[str, float] = {}
        """Servers that broke a rule, and until when they are kept out."""
        self._avoided: dict[str, float] = {}
        self._delays: dict[str, float] = {}
        self._own: dict[int, str] = {}
        self._links = Links(secrets.token_hex(8), secret, identity(self.spec), shape, tls)
        self._lock = threading.Lock()
        self._refreshed, self._why = 0.0, ""
        self.thread = LoopThread("swarm-client")
        self.thread.start()
        try:
            self.refresh()
            if not self._refreshed:
                raise UserError(f"no peer of the swarm answers at {', '.join(join)}: {self._why}",
                                "start one with `ridgeline swarm serve`, and give its address and secret")  # fmt: skip
        except BaseException:
            self.close()
            raise

    @property
    def sent(self) -> int:
        """Bytes of tensors sent to servers and received."""
        return self._links.sent

    # ---- asking ------------------------------------------------------------------------------------------------------

    def ask(self, address: str, op: str, message: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Answer:
        """A server's answer. Raises :class:`Lost`, :class:`Refused` or :class:`BadPeer`."""
        return self._wait(self._links.ask(address, op, message, tensors, self.patience))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self.thread.loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise

    def rows(self, answer: Answer, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Activations of an answer. Raises :class:`BadPeer`."""
        return decode_rows(name, answer.tensors, shape, dtype)

    @contextlib.contextmanager
    def watching(self, a: Announcement) -> Iterator[None]:
        """Bans the server, or avoids it for a while, for what goes wrong inside; raises that again."""
        try:
            yield
        except BadPeer as e:
            with self._lock:
                self.banned[a.peer] = time.monotonic() + BAN
            self.say(f"server {a.address} banned for {BAN:g} s: {e}")
            raise
        except (Lost, Refused) as e:
            with self._lock:
                self._avoided[a.peer] = time.monotonic() + AVOID
            self.say(f"server {a.address} avoided for {AVOID:g} s: {e}")
            raise

    # ---- who is there ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Ask for announcements: known servers, else those that were given."""
        self._wait(self._refresh())

    async def _refresh(self) -> None:
        known = [a.address for a in self.table.live()][:3]
        found = await asyncio.gather(*(self._fetch(address) for address in dict.fromkeys([*known, *self.join])))
        if any(found):
            self._refreshed = time.monotonic()
        new = [a for a in self.table.live() if a.peer not in self._delays]
        await asyncio.gather(*(self._ping(a) for a in new[:64]))

    async def _fetch(self, address: str) -> bool:
        try:
            start = time.monotonic()
            answer = await self._links.ask(address, "table", patience=self.patience)
            self.table.merge(answer.message.get("table"))
            self._delays |= {a.peer: time.monotonic() - start for a in self.table.live() if a.address == address}
            return True
        except TROUBLE as e:
            self._why = str(e)
            self.table.forget(a.peer for a in self.table.live() if a.address == address)
            return False

    async def _ping(self, a: Announcement) -> None:
        try:
            start = time.monotonic()
            await self._links.ask(a.address, "ping", patience=self.patience)
            self._delays[a.peer] = time.monotonic() - start
        except TROUBLE:
            self._avoided[a.peer] = time.monotonic() + AVOID

    def usable(self, training: bool = False) -> list[Announcement]:
        """Servers that may be asked: not banned, with our weights in the agreed form."""
        now = time.monotonic()
        fine = [a for a in self.table.live() if a.plan == self.plan and (a.trains or not training)
                and now >= self.banned.get(a.peer, 0.0) and now >= self._avoided.get(a.peer, 0.0)]  # fmt: skip
        return [a for a in fine if self._has_our_weights(a)]

    def _has_our_weights(self, a: Announcement) -> bool:
        """Whether a server announces the hashes of our checkpoint. One that does not is banned."""
        for block, weights in zip(range(a.start, a.stop), a.weights, strict=True):
            if block not in self._own:
                one = load_blocks(self.path, self.spec, range(block, block + 1))
                self._own[block] = block_hashes(one)[0]
            if self._own[block] != weights:
                self.banned[a.peer] = time.monotonic() + BAN
                self.say(f"server {a.address} banned for {BAN:g} s: it has other weights in block {block}")
                return False
        return True

    # ---- which way ---------------------------------------------------------------------------------------------------

    def route(self, start: int, stop: int, tokens: int = 0, training: bool = False) -> list[tuple[Announcement, Hop]]:
        """The fastest way through blocks ``start`` to ``stop`` for a sequence of ``tokens``. Waits for servers to come;
        raises :class:`UserError` when none did for ``patience`` s."""
        deadline = time.monotonic() + self.patience
        told = False
        if time.monotonic() - self._refreshed > FRESH:
            self.refresh()
        while True:
            servers = {a.peer: a for a in self.usable(training)}
            usual = sorted(self._delays.values())[len(self._delays) // 2] if self._delays else 0.0
            spans = [
                Span(a.peer, a.start, a.stop, a.throughput,
                     self._delays.get(a.peer, usual) + (PENALTY if a.room < tokens else 0.0), a.running)
                for a in servers.values()
            ]  # fmt: skip
            hops = find_route(spans, start, stop)
            if hops is not None:
                return [(servers[h.name], h) for h in hops]
            missing = [b for b in range(start, stop) if not any(s.start <= b < s.stop for s in spans)]
            if time.monotonic() >= deadline:
                raise UserError(f"no server has blocks {missing} of {self.spec.num_layers}",
                                "start one with `ridgeline swarm serve`")  # fmt: skip
            if not told:
                self.say(f"no server has blocks {missing}: waiting up to {self.patience:g} s for one")
                told = True
            time.sleep(0.2)
            self.refresh()

    def status(self) -> dict[str, Any]:
        """Servers and coverage as plain data."""
        servers = sorted(self.table.live(), key=lambda a: (a.start, a.address))
        covered = Counter(b for a in servers for b in range(a.start, a.stop))
        return {
            "model": self.spec.name, "blocks": self.spec.num_layers,
            "covered": [covered[b] for b in range(self.spec.num_layers)],
            "servers": [a.model_dump(exclude={"weights"}) | {"delay_s": self._delays.get(a.peer)} for a in servers],
        }  # fmt: skip

    def close(self) -> None:
        """Close all connections, so that servers forget this client's sequences at once."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._links.close(), self.thread.loop).result(5)
        self.thread.stop()
