"""A server of blocks: announces them, computes them for clients, and moves to where the swarm needs it more."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.serve.transfer.connection import Lost
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.model import ModelSpec
from ridgeline.swarm.announcements import Announcement, Table
from ridgeline.swarm.link import Answer, Link, Listener, Refused, Shape
from ridgeline.swarm.policies import Span, choose_move, choose_start, coverage
from ridgeline.swarm.span import Held, LoRA, SpanEngine, block_hashes, change_weights, identity, load_blocks
from ridgeline.spec.wire import Wire
from ridgeline.swarm.wire import decode_rows, encode_rows

MOST_ROWS = 4096
"""Rows of one packed step at most, and of one message."""
ASKED = 3
"""Peers with whom announcements are exchanged each time."""


@dataclass
class Options:
    """How a server behaves; times in seconds."""

    cache_tokens: int = 8192
    """Tokens of clients' sequences that its cache has room for."""
    plan: str = ""
    """Technique that stores the weights otherwise (``smooth_int8``)."""
    throughput: float = 0.0
    """Tokens/s to announce; 0: measured."""
    announce_every: float = 5.0
    """A server that was silent for four times as long is forgotten."""
    balance_every: float = 60.0
    """How often it considers other blocks; 0: never."""


class Worker:
    """The thread that computes. Steps of sequences that wait for the same blocks go in one batch."""

    def __init__(self) -> None:
        self.batches: dict[int, int] = {}
        """How many batches had how many sequences."""
        self._steps: list[tuple[SpanEngine, Held, Tensor, Future[Tensor]]] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="swarm-worker", daemon=True)
        self._thread.start()

    def step(self, engine: SpanEngine, held: Held, x: Tensor) -> Future[Tensor]:
        """The next rows of a sequence."""
        found: Future[Tensor] = Future()
        with self._news:
            self._steps.append((engine, held, x, found))
            self._news.notify()
        return found

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """``function()``, on this thread."""
        found: Future[Any] = Future()
        with self._news:
            self._calls.append((function, found))
            self._news.notify()
        return found

    def stop(self) -> None:
        """End."""
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            with self._news:
                while not (self._steps or self._calls or self._stopped):
                    self._news.wait()
                if self._stopped:
                    return
                calls, self._calls = self._calls, []
                batch = self._take()
            for function, found in calls:
                _settle(found, function)
            if batch:
                self._compute(batch)

    def _take(self) -> list[tuple[SpanEngine, Held, Tensor, Future[Tensor]]]:
        """The waiting steps that fit into one batch with the first."""
        batch, rest, rows = [], [], 0
        for item in self._steps:
            engine, held, x, _ = item
            alike = not batch or (engine, held.start, held.stop) == (batch[0][0], batch[0][1].start, batch[0][1].stop)
            if alike and (not batch or rows + len(x) <= MOST_ROWS) and all(held is not other[1] for other in batch):
                batch.append(item)
                rows += len(x)
            else:
                rest.append(item)
        self._steps = rest
        return batch

    def _compute(self, batch: list[tuple[SpanEngine, Held, Tensor, Future[Tensor]]]) -> None:
        self.batches[len(batch)] = self.batches.get(len(batch), 0) + 1
        try:
            rows = batch[0][0].step([(held, x) for _, held, x, _ in batch])
        except Exception as e:
            for *_, found in batch:
                found.set_exception(e)
            return
        for (*_, found), y in zip(batch, rows, strict=True):
            found.set_result(y)


def _settle(found: Future[Any], function: Callable[[], Any]) -> None:
    try:
        found.set_result(function())
    except Exception as e:
        found.set_exception(e)


class Server:
    """One peer. Methods are for the event loop's thread; computing happens on the worker's."""

    def __init__(
        self, path: Path, secret: bytes, options: Options, say: Callable[[str], None], join: tuple[str, ...] = (),
        shape: Shape | None = None,
    ) -> None:  # fmt: skip
        """``path``: the checkpoint. ``join``: addresses of peers that are known already."""
        self.path, self.options, self.say, self.join = path, options, say, join
        self.spec = ModelSpec.from_path(path)
        self.peer = secrets.token_hex(8)
        self.table = Table(self.spec.num_layers, 4 * options.announce_every)
        self.worker = Worker()
        self.engine: SpanEngine
        self.moves = 0
        self._secret, self._identity = secret, identity(self.spec)
        self._listener = Listener(secret, self._identity, self._handle, self._gone, say, shape)
        self._links: dict[str, Link] = {}
        self._held: dict[tuple[str, str], Held] = {}
        self._hashes: list[str] = []
        self._throughput, self._number = options.throughput, 0
        self._address = ""
        self._rng = random.Random(self.peer)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int, blocks: range | int, reach: str = "") -> str:
        """Join the swarm with these blocks, or as many where they are needed most → the address. ``reach``: host by
        which others reach this server, if not ``host``."""
        port = await self._listener.listen(host, port)
        self._address = f"{reach or host}:{port}"
        await self._gossip(self.join)
        if isinstance(blocks, int):
            blocks = self._best(min(blocks, self.spec.num_layers))
        await self._serve_blocks(blocks)
        self._announce()
        await self._gossip()
        self._tasks = [asyncio.create_task(self._keep_announcing())]
        if self.options.balance_every:
            self._tasks.append(asyncio.create_task(self._keep_balanced()))
        return self._address

    async def stop(self) -> None:
        """Tell the others, and end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "engine"):
            self._announce(left=True)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._gossip(), 2.0)
        for link in list(self._links.values()):
            await link.close()
        await self._listener.close()
        self.worker.stop()

    # ---- which blocks ------------------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """All servers, as policies see them."""
        return [Span(a.peer, a.start, a.stop, a.throughput) for a in self.table.live()]

    def _best(self, count: int) -> range:
        start = choose_start(coverage(self.spans(), self.spec.num_layers), count)
        return range(start, start + count)

    async def _serve_blocks(self, blocks: range) -> None:
        """Load blocks, and serve them instead of those before; clients' sequences there are lost to them."""

        def load() -> tuple[SpanEngine, list[str], float]:
            model = load_blocks(self.path, self.spec, blocks)
            hashes = block_hashes(model)
            change_weights(model, self.options.plan)
            engine = SpanEngine(model, self.options.cache_tokens)
            return engine, hashes, self.options.throughput or measured_throughput(engine)

        loaded = await asyncio.wrap_future(self.worker.call(load))
        self._held.clear()
        self.engine, self._hashes, self._throughput = loaded
        self.say(f"serves blocks {blocks.start} to {blocks.stop} of {self.spec.num_layers} at {self._address}, "
                 f"{self._throughput:.0f} tokens/s")  # fmt: skip

    async def _keep_balanced(self) -> None:
        while True:
            await asyncio.sleep(self.options.balance_every * self._rng.uniform(0.5, 1.5))
            start = choose_move(self.spans(), self.peer, self.spec.num_layers, self._rng)
            if start is not None:
                await self._serve_blocks(range(start, start + self.engine.stop - self.engine.start))
                self.moves += 1
                self._announce()
                await self._gossip()

    # ---- announcements -----------------------------------------------------------------------------------------------

    def _announce(self, left: bool = False) -> None:
        self._number += 1
        e = self.engine
        self.table.put(Announcement(
            peer=self.peer, number=self._number, address=self._address, start=e.start, stop=e.stop,
            weights=self._hashes, plan=self.options.plan, trains=not self.options.plan, throughput=self._throughput,
            running=len(self._held), room=e.room, left=left,
        ))  # fmt: skip

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(self.options.announce_every * self._rng.uniform(0.5, 1.0))
            self._announce()
            await self._gossip()

    async def _gossip(self, addresses: tuple[str, ...] = ()) -> None:
        """Exchange announcements with the peers at ``addresses``, or with some that are known."""
        known = [a.address for a in self.table.live() if a.peer != self.peer]
        chosen = addresses or tuple(self._rng.sample(known, min(ASKED, len(known)))) or self.join
        await asyncio.gather(*(self._exchange(address) for address in chosen if address != self._address))

    async def _exchange(self, address: str) -> None:
        try:
            link = self._links.get(address)
            if link is None or link.broken:
                link = self._links[address] = await Link.open(address, self._secret, self._identity)
            table = {"table": self.table.share(), "from": self.peer}
            answer = await link.ask("table", table, patience=self.options.announce_every + 1)
            self.table.merge(answer.message.get("table"))
        except BadPeer as e:
            self._links.pop(address, None)
            self.say(f"peer {address} refused: {e}")
        except (Lost, Refused):
            self._links.pop(address, None)

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def _handle(self, owner: str, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        if op == "table":
            self.table.merge(m.get("table", []))
            return Answer({"table": self.table.share()})
        if op == "ping":
            return Answer()
        if not hasattr(self, "engine"):
            raise Refused("it is still loading")
        if op == "step":
            return await self._step(owner, m, tensors)
        if op == "open":
            key = owner, _text(m, "session")
            if key in self._held:
                raise BadPeer("it opened a sequence twice")
            engine, numbers = self.engine, [_number(m, name) for name in ("start", "stop", "most")]
            self._held[key] = await asyncio.wrap_future(self.worker.call(lambda: engine.open(owner, *numbers)))
            return Answer()
        if op == "close":
            self._close((owner, _text(m, "session")))
            return Answer()
        if op in ("forward", "backward"):
            return await self._train(op, m, tensors)
        raise BadPeer(f"it asked for {op[:40]!r}, which nobody does")

    async def _step(self, owner: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        held = self._held.get((owner, _text(m, "session")))
        if held is None:
            raise Refused("it has no such sequence")
        engine, rows, wire = self.engine, _number(m, "rows"), _wire(m)
        if rows > MOST_ROWS:
            raise BadPeer(f"it sent {rows} rows, of {MOST_ROWS} at most")
        engine.take(held, _number(m, "at"), rows)
        x = decode_rows("x", tensors, (rows, self.spec.hidden_size), engine.dtype)
        y = await asyncio.wrap_future(self.worker.step(engine, held, x))
        return Answer({}, encode_rows("y", y, wire))

    async def _train(self, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        if self.options.plan:
            raise Refused(f"it computes no gradients through {self.options.plan}")
        engine, wire = self.engine, _wire(m)
        batch, length, start, stop = (_number(m, name) for name in ("batch", "length", "start", "stop"))
        if not (0 < batch * length <= MOST_ROWS and length <= self.spec.max_positions):
            raise BadPeer(f"it sent {batch} sequences of {length} rows, of {MOST_ROWS} rows at most")
        shape = (batch, length, self.spec.hidden_size)
        x, lora = decode_rows("x", tensors, shape, engine.dtype), unpack_lora(tensors)
        if op == "forward":
            y = await asyncio.wrap_future(self.worker.call(lambda: engine.forward(x, start, stop, lora)))
            return Answer({}, encode_rows("y", y, wire))
        grad = decode_rows("grad", tensors, shape, engine.dtype)
        found = await asyncio.wrap_future(self.worker.call(lambda: engine.backward(x, grad, start, stop, lora)))
        return Answer({}, encode_rows("grad", found[0], wire) | pack_lora(found[1]))

    def _close(self, key: tuple[str, str]) -> None:
        held = self._held.pop(key, None)
        if held is not None:  # after steps that wait
            engine = self.engine
            self.worker.call(lambda: engine.close(held))

    def _gone(self, owner: str) -> None:
        for key in [k for k in self._held if k[0] == owner]:
            self._close(key)


def measured_throughput(engine: SpanEngine, sequences: int = 4, rounds: int = 5) -> float:
    """Tokens/s of an engine that decodes a few sequences, from the median of a few steps."""
    held = [engine.open("", engine.start, engine.stop, rounds + 1) for _ in range(sequences)]
    x = torch.zeros(1, engine.model.spec.hidden_size, dtype=engine.dtype)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine.step([(h, x) for h in held])
        times.append(time.perf_counter() - start)
    for h in held:
        engine.close(h)
    return sequences / sorted(times[1:])[rounds // 2]


def pack_lora(lora: LoRA) -> dict[str, Tensor]:
    """Updates as tensors to send."""
    return {f"lora.{part}.{name}": t.contiguous() for name, pair in lora.items()
            for part, t in zip("ab", pair, strict=True)}  # fmt: skip


def unpack_lora(tensors: dict[str, Tensor]) -> LoRA:
    """The updates among tensors, as :func:`pack_lora` packed them. Raises :class:`BadPeer`."""
    names = {n[len("lora.a."):] for n in tensors if n.startswith("lora.a.")}
    out: LoRA = {}
    for name in sorted(names):
        a, b = tensors[f"lora.a.{name}"], tensors.get(f"lora.b.{name}")
        if b is None or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise BadPeer(f"it sent half an update of {name[:80]!r}, or one that is not finite")
        out[name] = a, b
    return out


def _number(m: dict[str, Any], name: str) -> int:
    value = m.get(name)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise BadPeer(f"it sent {value!r} as {name}"[:200])
    return value


def _text(m: dict[str, Any], name: str) -> str:
    value = m.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise BadPeer(f"it sent no {name}")
    return value


def _wire(m: dict[str, Any]) -> Wire:
    if m.get("wire") == "plain":
        return "plain"
    if m.get("wire") == "blockwise8":
        return "blockwise8"
    raise BadPeer("it asked for an unknown format of activations")
