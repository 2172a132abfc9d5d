"""Servers of a small model: in this process, or as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import torch
from tests.forked import Fork, command

from ridgeline.nn import build, save_checkpoint
from ridgeline.nn.kernels import native
from ridgeline.serve.transfer.connection import LoopThread
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.server import Options, Server
from ridgeline.techniques.matrix import TINY

SECRET = b"a secret of this test's swarm"
SPEC = TINY.changed(num_layers=6, max_positions=256)


def checkpoint(path: Path, seed: int = 3, **changes):
    """A model whose attention is far from uniform, saved."""
    spec = SPEC.changed(**changes) if changes else SPEC
    model = build(spec, seed=seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    save_checkpoint(model, path)
    return path


class Local:
    """Servers on an event loop of this process. ``lines`` holds what they and the clients said."""

    def __init__(self, path: Path) -> None:
        native.library()  # compiled before anything is timed
        self.path, self.lines = path, []
        self.servers: list[Server] = []
        self.addresses: list[str] = []
        self.clients: list[Swarm] = []
        self.thread = LoopThread("test-servers")
        self.thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.thread.loop).result(60)

    def serve(self, blocks, path=None, kind=Server, secret=SECRET, shape=None, join=None, **options) -> Server:
        """One more, which knows the first."""
        fixed = {"announce_every": 0.2, "balance_every": 0.0, "throughput": 100.0, "cache_tokens": 2048}
        joined = tuple(self.addresses[:1]) if join is None else join

        async def start():
            made = Options(**{**fixed, **options})
            server = kind(path or self.path, secret, made, self.lines.append, blocks, joined, shape)
            return server, await server.start("127.0.0.1", 0)

        server, address = self.run(start())
        self.servers.append(server)
        self.addresses.append(address)
        return server

    def client(self, **options) -> Swarm:
        settings = {"wire": "plain", "patience": 10.0, **options}
        found = Swarm(self.path, tuple(self.addresses[:1]), SECRET, self.lines.append, **settings)
        self.clients.append(found)
        return found

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            with contextlib.suppress(Exception):
                self.run(server.stop())
        self.thread.stop()


class Process:
    """`ridgeline swarm serve` as a process of its own."""

    def __init__(self, path: Path, folder: Path, *words: str) -> None:
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        self.log = folder / f"{time.monotonic_ns()}.log"
        self.log.touch()
        self.child = Fork(command, str(self.log), "swarm", "serve", str(path), "--fleet-secret-file", str(secret),
                          "--announce-every", "0.3", "--balance-every", "0", "--throughput", "100", *words)  # fmt: skip

    def address(self) -> str:
        """Where it listens, once it serves."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.child.poll() is None:
            for line in self.log.read_text().splitlines():
                if line.startswith("serves blocks"):
                    return line.split(" at ")[1].split(",")[0]
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def kill(self) -> None:
        """End it with no chance to say good-bye."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def close(self) -> None:
        if self.child.poll() is None:
            self.kill()
