"""Two engines in one process, with real sockets between them."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry
from tests.serving import collect, engine

from ridgeline.serve.transfer.client import PrefillClient
from ridgeline.serve.transfer.counts import TransferCounts
from ridgeline.serve.transfer.server import PrefillServer

SECRET = b"a secret of the tests"


class Side:
    """An engine, and the calls that are posted to it."""

    def __init__(self, made, *plan, **fields):
        self.engine = engine(made, *plan, **fields)
        self.calls, self.said, self.registry = deque(), [], CollectorRegistry()
        self.counts = TransferCounts(self.registry)
        self.fingerprint = self.engine.fingerprint()
        self.events = []

    def step(self):
        """What the engine's thread does in one turn → whether there was anything to do."""
        busy = bool(self.calls) or self.engine.has_work()
        self.take_calls()
        if self.engine.has_work():
            self.events += self.engine.step()
            self.engine.check()
        return busy

    def take_calls(self):
        """The part of a turn before the engine's step."""
        while self.calls:
            self.calls.popleft()()
        self.engine.check()

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"ridgeline_transfer_{name}", labels) or 0.0

    def idle(self):
        assert not self.engine.groups
        assert self.engine.blocks.used == 0
        assert not self.engine.scheduler.arriving
        assert not self.engine.exports.open
        assert not self.engine.imports.open

    def serve(self, secret=SECRET, tls=None):
        """Listen → the address."""
        args = self.engine, self.engine.exports, self.calls.append, secret, self.fingerprint, self.counts
        self.server = PrefillServer(*args, self.said.append, tls)
        return f"127.0.0.1:{self.server.listen('127.0.0.1', 0)}"

    def connect(self, secret=SECRET, tls=None):
        args = self.engine.imports, self.calls.append, secret, self.fingerprint, self.counts
        self.client = PrefillClient(*args, self.said.append, tls)

    def close(self):
        for end in (getattr(self, "server", None), getattr(self, "client", None)):
            if end is not None:
                end.close()


@contextmanager
def pair(prefill_model, decode_model=None, *plan, whole_below=1, secret=SECRET, tls=(None, None), **fields):
    """(prefill side, decode side, address of the first)."""
    plan = (*plan, f"splitwise:whole_below={whole_below}")
    prefill = Side(prefill_model, *plan, **fields)
    decode = Side(decode_model if decode_model is not None else prefill_model, *plan, **fields)
    try:
        address = prefill.serve(tls=tls[0])
        decode.connect(secret, tls[1])
        yield prefill, decode, address
    finally:
        prefill.close()
        decode.close()


def run(sides, until, seconds=60.0):
    """Step all sides until ``until()``."""
    deadline = time.monotonic() + seconds
    while not until():
        busy = [side.step() for side in sides]
        if not any(busy):
            time.sleep(0.001)
        assert time.monotonic() < deadline, [side.said for side in sides]


def wait_for(side, until, seconds=60.0):
    """Let a side take calls, but make no step, until ``until()``."""
    deadline = time.monotonic() + seconds
    while not until():
        side.take_calls()
        time.sleep(0.001)
        assert time.monotonic() < deadline, side.said


def split(prefill, decode, address, *requests):
    """Serve ``requests`` → tokens by (request, output)."""
    for r in requests:
        decode.engine.add(replace(r, prefill_at=address))
    run([prefill, decode], lambda: not decode.engine.groups and not decode.engine.outputs.events)
    return collect(decode.events)
