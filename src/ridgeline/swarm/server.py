"""A server of blocks: computes them for clients, and moves to where the swarm needs it more (Petals)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.model import ModelSpec
from ridgeline.swarm.link import Answer, Refused, Shape
from ridgeline.swarm.peer import Peer, number, text, wire_of
from ridgeline.swarm.policies import choose_move, choose_start, coverage
from ridgeline.swarm.span import Held, LoRA, SpanEngine, block_hashes, change_weights, identity, load_blocks
from ridgeline.swarm.wire import decode_rows, encode_rows
from ridgeline.swarm.worker import MOST_ROWS, Worker


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


class Server(Peer):
    """One server. Methods are for the event loop's thread; computing happens on the worker's."""

    def __init__(
        self, path: Path, secret: bytes, options: Options, say: Callable[[str], None], blocks: range | int,
        join: tuple[str, ...] = (), shape: Shape | None = None, tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``path``: the checkpoint. ``blocks``: those to serve, or how many where they are needed most."""
        self.path, self.options, self.spec = path, options, ModelSpec.from_path(path)
        layers, every = self.spec.num_layers, options.announce_every
        super().__init__(identity(self.spec), layers, secret, every, say, join, shape, tls)
        self.worker = Worker()
        self.engine: SpanEngine
        self.moves = 0
        self._blocks = blocks
        self._held: dict[tuple[str, str], Held] = {}
        self._hashes: list[str] = []
        self._throughput = options.throughput

    async def prepare(self) -> None:
        """Load the blocks."""
        blocks = self._blocks
        if isinstance(blocks, int):
            count = min(blocks, self.spec.num_layers)
            start = choose_start(coverage(self.spans(), self.spec.num_layers), count)
            blocks = range(start, start + count)
        await self._serve_blocks(blocks)
        if self.options.balance_every:
            self.tasks.append(asyncio.create_task(self._keep_balanced()))

    async def stop(self) -> None:
        """Tell the others, and end."""
        await super().stop()
        self.worker.stop()

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
        self.say(f"serves blocks {blocks.start} to {blocks.stop} of {self.spec.num_layers} at {self.address}, "
                 f"{self._throughput:.0f} tokens/s")  # fmt: skip

    async def _keep_balanced(self) -> None:
        while not self.stopped:
            await asyncio.sleep(self.options.balance_every * self.rng.uniform(0.5, 1.5))
            self.note()  # after a pause its own announcement may have expired
            start = choose_move(self.spans(), self.peer, self.spec.num_layers, self.rng)
            if start is not None:
                await self._serve_blocks(range(start, start + self.engine.stop - self.engine.start))
                self.moves += 1
                await self.announce()

    def record(self) -> dict[str, Any]:
        """Its announcement."""
        e = self.engine
        return {
            "start": e.start, "stop": e.stop, "weights": self._hashes, "plan": self.options.plan,
            "trains": not self.options.plan, "throughput": self._throughput, "running": len(self._held), "room": e.room,
        }  # fmt: skip

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, owner: str, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """Sequences (open, step, close), and passes for training (forward, backward)."""
        if op == "step":
            return await self._step(owner, m, tensors)
        if op == "open":
            key = owner, text(m, "session")
            if key in self._held:
                raise BadPeer("it opened a sequence twice")
            engine, numbers = self.engine, [number(m, name) for name in ("start", "stop", "most")]
            opened = self.worker.call(lambda: engine.open(owner, *numbers))
            try:
                self._held[key] = await asyncio.wrap_future(opened)
            except asyncio.CancelledError:  # the client has gone meanwhile

                def undo(f: Future[Held]) -> None:
                    if not f.cancelled() and f.exception() is None:
                        self._forget(engine, f.result())

                opened.add_done_callback(undo)
                raise
            return Answer()
        if op == "close":
            self._close((owner, text(m, "session")))
            return Answer()
        if op in ("forward", "backward"):
            return await self._train(op, m, tensors)
        raise BadPeer(f"it asked for {op[:40]!r}, which nobody does")

    async def _step(self, owner: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        held = self._held.get((owner, text(m, "session")))
        if held is None:
            raise Refused("it has no such sequence")
        engine, rows, wire = self.engine, number(m, "rows"), wire_of(m)
        if rows > MOST_ROWS:
            raise BadPeer(f"it sent {rows} rows, of {MOST_ROWS} at most")
        engine.take(held, number(m, "at"), rows)
        x = decode_rows("x", tensors, (rows, self.spec.hidden_size), engine.dtype)
        y = await asyncio.wrap_future(self.worker.step(engine, held, x))
        return Answer({}, encode_rows("y", y, wire))

    async def _train(self, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        if self.options.plan:
            raise Refused(f"it computes no gradients through {self.options.plan}")
        engine, wire = self.engine, wire_of(m)
        batch, length, start, stop = (number(m, name) for name in ("batch", "length", "start", "stop"))
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
            self._forget(self.engine, held)

    def _forget(self, engine: SpanEngine, held: Held) -> None:
        self.worker.call(lambda: engine.close(held))

    def gone(self, owner: str) -> None:
        """Its sequences are over."""
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
    names = {n[len("lora.a.") :] for n in tensors if n.startswith("lora.a.")}
    out: LoRA = {}
    for name in sorted(names):
        a, b = tensors[f"lora.a.{name}"], tensors.get(f"lora.b.{name}")
        if b is None or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise BadPeer(f"it sent half an update of {name[:80]!r}, or one that is not finite")
        out[name] = a, b
    return out
