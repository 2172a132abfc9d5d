"""The decode server's connections: asks prefill servers for prompts, and checks all that they send."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ridgeline.serve.request import Sampling, TokenLogprob
from ridgeline.serve.transfer.connection import Connection, LoopThread, Lost, connected
from ridgeline.serve.transfer.counts import TransferCounts
from ridgeline.serve.transfer.frames import BadPeer, Frame, Kind
from ridgeline.serve.transfer.imports import Imports, Prompt
from ridgeline.serve.transfer.server import Post, described

CONNECT = 3.0
"""Seconds for a connection."""
PATIENCE = 30.0
"""Seconds without a frame about a prompt after which it is computed here: a peer that only shows signs of life may have
dropped it, and one that is this slow is of no use."""
BAN = 60.0
"""Seconds during which a peer that was refused is not asked again."""


@dataclass
class Incoming:
    """A prompt on its way."""

    prompt: Prompt
    have: list[int]
    """Tokens that have come, by layer: in order, without gaps."""
    first: float | None = None
    """When the first token came."""
    moved: float = field(default_factory=time.monotonic)
    """When it was asked for, or its last frame came."""

    @property
    def whole(self) -> bool:
        """Whether everything has come."""
        return self.first is not None and all(n == self.prompt.upto for n in self.have)


@dataclass(eq=False)
class Peer:
    """One prefill server."""

    address: str
    connection: Connection | None = None
    """None until it has been greeted."""
    waiting: dict[str, Incoming] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class PrefillClient:
    """Asks prefill servers; a thread of its own. ``say`` gets a line for each peer that is refused or lost."""

    def __init__(
        self, imports: Imports, post: Post, secret: bytes, fingerprint: str, counts: TransferCounts,
        say: Callable[[str], None], tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._tls = tls
        self.imports, self.post, self.counts, self.say = imports, post, counts, say
        self._secret, self._fingerprint = secret, fingerprint
        self._peers: dict[str, Peer] = {}
        self._banned: dict[str, float] = {}
        self._vocabulary = imports.engine.spec.vocab_size
        self.thread = LoopThread("prefill-client")
        self.thread.start()
        imports.client = self

    def ask(self, address: str, prompt: Prompt) -> None:
        """As :class:`.imports.Asks`."""
        self.thread.call(self._ask, address, prompt)

    def cancel(self, address: str, request: str) -> None:
        """As :class:`.imports.Asks`."""
        self.thread.call(self._cancel, address, request)

    def close(self) -> None:
        """Close all connections."""
        self.thread.stop()

    # ---- on the event loop -------------------------------------------------------------------------------------------

    def _ask(self, address: str, prompt: Prompt) -> None:
        if time.monotonic() < self._banned.get(address, 0.0):
            self._lost(prompt.request.id, "lost")
            return
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address)
            peer.task = asyncio.ensure_future(self._talk(peer))
        peer.waiting[prompt.request.id] = Incoming(prompt, [prompt.start] * len(self.imports.layout.layers))
        if peer.connection is not None:
            self._send(peer.connection, prompt)

    def _send(self, connection: Connection, prompt: Prompt) -> None:
        r = prompt.request
        own = replace(r.sampling, n=1, best_of=None, beam_width=0, seed=prompt.seed)
        sampling = own if prompt.first else Sampling(max_tokens=1, temperature=0.0)
        message = {**described(r, sampling), "start": prompt.start, "upto": prompt.upto}
        tokens = torch.tensor(r.prompt, dtype=torch.int32)
        connection.send(Kind.PREFILL, message, lambda: {"tokens": tokens})

    def _cancel(self, address: str, request: str) -> None:
        peer = self._peers.get(address)
        if peer is not None and peer.waiting.pop(request, None) is not None:
            self.counts.prompts.labels("cancelled").inc()
            if peer.connection is not None:
                peer.connection.send(Kind.CANCEL, {"id": request})

    def _lost(self, request: str, result: str) -> None:
        self.counts.prompts.labels(result).inc()
        self.post(partial(self.imports.lost, request))

    async def _talk(self, peer: Peer) -> None:
        """A connection from its beginning to its end."""
        connection: Connection | None = None
        pump: asyncio.Task[None] | None = None
        watch = asyncio.create_task(self._give_up_late(peer))
        try:
            connection = await self._connect(peer)
            peer.connection = connection
            for incoming in peer.waiting.values():
                self._send(connection, incoming.prompt)
            pump = asyncio.create_task(connection.pump())
            pump.add_done_callback(lambda _: connection.close())
            while True:
                await self._take(peer, await connection.receive())
        except BadPeer as e:
            self.counts.refused.inc()
            self._banned[peer.address] = time.monotonic() + BAN
            self.say(f"prefill server {peer.address} refused for {BAN:g} s: {e}; {self._consequence(peer)}")
        except Lost as e:
            if peer.waiting:
                self.say(f"prefill server {peer.address} lost: {e}; {self._consequence(peer)}")
        finally:
            self._peers.pop(peer.address, None)
            watch.cancel()
            if connection is not None:
                connection.close()
            if pump is not None:
                pump.cancel()
                with contextlib.suppress(asyncio.CancelledError, Lost):
                    await pump
            for request in peer.waiting:
                self._lost(request, "lost")

    async def _give_up_late(self, peer: Peer) -> None:
        """Have prompts computed here about which nothing was heard for too long."""
        while True:
            await asyncio.sleep(PATIENCE / 10)
            late = [n for n, i in peer.waiting.items() if time.monotonic() - i.moved > PATIENCE]
            for name in late:
                del peer.waiting[name]
                if peer.connection is not None:
                    peer.connection.send(Kind.CANCEL, {"id": name})
                self._lost(name, "lost")
            if late:
                self.say(f"prefill server {peer.address} sent nothing of some prompts for {PATIENCE:g} s; computed here"
                         f" instead: {len(late)}")  # fmt: skip

    @staticmethod
    def _consequence(peer: Peer) -> str:
        return f"prompts computed here instead: {len(peer.waiting)}"

    async def _connect(self, peer: Peer) -> Connection:
        connection = await connected(peer.address, CONNECT, self._tls)
        try:
            await connection.greet(self._secret, self._fingerprint, asks=True)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _take(self, peer: Peer, frame: Frame) -> None:
        """Act on one frame. Raises :class:`BadPeer`."""
        if frame.kind is Kind.PING:
            return
        m, name = frame.message, frame.message.get("id")
        if frame.kind not in (Kind.KV, Kind.FIRST, Kind.FAILED) or not isinstance(name, str):
            raise BadPeer(f"it sent a frame {frame.kind.name} without meaning here")
        incoming = peer.waiting.get(name)
        if incoming is None:  # cancelled meanwhile
            return
        incoming.moved = time.monotonic()
        if frame.kind is Kind.FAILED:
            del peer.waiting[name]
            self._lost(name, "failed")
            return
        if frame.kind is Kind.KV:
            await asyncio.to_thread(self._write, incoming, frame)
        else:
            self._first(incoming, m)
        if incoming.whole and peer.waiting.pop(name, None) is not None:
            assert incoming.first is not None
            self.counts.prompts.labels("complete").inc()
            self.counts.wait.observe(time.monotonic() - incoming.first)
            self.post(partial(self.imports.complete, name, incoming.prompt.upto))

    def _write(self, incoming: Incoming, frame: Frame) -> None:
        m, prompt = frame.message, incoming.prompt
        numbers = (*m["layers"], m.get("at"), m.get("tokens")) if isinstance(m.get("layers"), list) else ()
        if len(numbers) != 4 or not all(type(n) is int for n in numbers):
            raise BadPeer("it sent keys and values without saying which")
        first, last, at, tokens = numbers
        if not (0 <= first < last <= len(incoming.have) and tokens > 0 and at + tokens <= prompt.upto):
            raise BadPeer(f"it sent layers {first} to {last} of tokens {at} to {at + tokens}, which were not asked for")
        layers = range(first, last)
        if any(incoming.have[layer] != at for layer in layers):
            due = incoming.have[first]
            raise BadPeer(f"it sent tokens from {at} of layer {first}, where {due} was due")
        self.imports.layout.require(layers, tokens, frame.tensors)
        for layer in layers:
            incoming.have[layer] = at + tokens
        self.counts.received.inc(sum(t.nbytes for t in frame.tensors.values()))
        self.post(partial(self.imports.write, prompt.request.id, layers, at, tokens, frame.tensors))

    def _first(self, incoming: Incoming, m: dict[str, Any]) -> None:
        token, cached, prompt = m.get("token"), m.get("cached"), incoming.prompt
        if incoming.first is not None or type(token) is not int or not 0 <= token < self._vocabulary:
            raise BadPeer(f"it sent {token!r} as first token")
        if type(cached) is not int or not 0 <= cached < len(prompt.request.prompt):
            raise BadPeer(f"it says that {cached!r} tokens were cached")
        incoming.first = time.monotonic()
        if prompt.first:
            wanted = prompt.request.sampling.logprobs
            logprob = None if wanted is None else _logprob(m.get("logprob"), token, self._vocabulary)
            self.post(partial(self.imports.first, prompt.request.id, token, logprob, cached))


def _logprob(given: Any, token: int, vocabulary: int) -> TokenLogprob:
    """The log-probability of a first token. Raises :class:`BadPeer`."""

    def known(t: Any, p: Any) -> bool:
        return type(t) is int and 0 <= t < vocabulary and (p is None or math.isfinite(p))

    try:
        own, p, top = given
        fine = own == token and known(own, p) and all(known(t, x) for t, x in top)
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise BadPeer("it sent a log-probability that is none")

    def number(x: float | None) -> float:
        return -math.inf if x is None else float(x)

    return TokenLogprob(token, number(p), tuple((t, number(x)) for t, x in top))
