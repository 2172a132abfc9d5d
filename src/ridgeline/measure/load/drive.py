"""Send a workload's requests when they are due, or in a closed loop, and record the outcomes."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ridgeline.jobs.job import Progress
from ridgeline.measure.load.clock import run
from ridgeline.measure.load.endpoint import Endpoint, refused
from ridgeline.measure.load.http_client import ConnectionPool
from ridgeline.measure.load.prompts import Prompts
from ridgeline.measure.load.record import Record
from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.spec.errors import UserError

LEAD = 0.05
"""Seconds between the end of warm-up and the time that arrivals count from."""


@dataclass
class Drive:
    """The requests that were sent. ``began``: the loop's time that arrivals count from."""

    records: list[Record]
    began: float
    ended: float
    interrupted: bool = False
    template: int = 0
    """Tokens that the server counts beside a prompt's own, as of a chat template: all prompts share those."""


def drive(
    endpoint: Endpoint,
    arrivals: Sequence[Arrival],
    prompts: Prompts,
    concurrency: int | None = None,
    warmup: int = 3,
    timeout: float = 600.0,
    progress: Progress = lambda _: None,
) -> Drive:
    """Send the requests at their arrival times whether or not earlier ones are answered; with ``concurrency``, keep
    that many in flight instead. ``warmup`` requests go before, one by one, and are not counted.

    Ctrl-C ends it: requests in flight are dropped, others returned, and what handled it before does so again.

    Raises :class:`UserError` when the first request of all is refused.
    """
    _raise_file_limit()
    with _quiet_memory():
        return run(_Driver(endpoint, arrivals, prompts, concurrency, timeout, progress).run(warmup))


class _Driver:
    def __init__(self, endpoint: Endpoint, arrivals: Sequence[Arrival], prompts: Prompts, concurrency: int | None,
                 timeout: float, progress: Progress) -> None:  # fmt: skip
        self.endpoint, self.arrivals, self.prompts, self.concurrency = endpoint, arrivals, prompts, concurrency
        self.timeout, self.progress = timeout, progress
        self.records: list[Record] = []
        self.finished = self.failed = self.template = 0

    async def run(self, warmup: int) -> Drive:
        self.loop = asyncio.get_running_loop()
        self.pool = ConnectionPool(self.endpoint.url, self.endpoint.headers, self.timeout)
        self.stop, self.news = asyncio.Event(), asyncio.Event()
        with _interrupts(lambda: self.loop.call_soon_threadsafe(self.stop.set)):
            return await self._drive(warmup)

    async def _drive(self, warmup: int) -> Drive:
        for i in range(warmup):
            await self._warm(i)
        watch = self.loop.create_task(self._watch())
        began = self.loop.time() + LEAD
        work = self.loop.create_task(self._closed() if self.concurrency else self._open(began))
        stopped = self.loop.create_task(self.stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        interrupted = not work.done()
        ended = self.loop.time()
        for task in (work, stopped, watch):
            task.cancel()
        self.pool.drop_all()
        if not interrupted:
            work.result()
        if self.concurrency and self.records:
            began = min(r.intended for r in self.records)
        return Drive(self.records, began, ended, interrupted, self.template)

    async def _open(self, began: float) -> None:
        for i, request in enumerate(self.arrivals):
            record, body = self._prepare(i, request)
            record.intended = began + request.arrival
            # Also when late: answers must be read in between.
            await asyncio.sleep(max(0.0, record.intended - self.loop.time()))
            self.records.append(record)
            self.pool.send(body, record, self._settle)
        await self._all_settled()

    async def _closed(self) -> None:
        waiting = iter(enumerate(self.arrivals))

        def following(over: Record | None = None) -> None:
            if over is not None:
                self._settle(over)
            now = self.loop.time()
            found = next(waiting, None)
            if found is not None:
                record, body = self._prepare(*found)
                record.intended = now
                self.records.append(record)
                self.pool.send(body, record, following)

        for _ in range(self.concurrency or 1):
            following()
        await self._all_settled()

    async def _all_settled(self) -> None:
        while self.finished < len(self.arrivals):
            self.news.clear()
            await self.news.wait()

    def _prepare(self, index: int, r: Arrival) -> tuple[Record, bytes]:
        body = self.endpoint.body(self.prompts.make(index, r.prompt), r.output)
        return Record(index, 0.0, r.prompt, r.output), body

    def _settle(self, record: Record) -> None:
        self.finished += 1
        self.failed += bool(record.error)
        if self.finished == len(self.arrivals):
            self.news.set()

    async def _warm(self, i: int) -> None:
        """One request of its own prompt, so that no cache of prompts is warmed for those that count."""
        request = self.arrivals[i % len(self.arrivals)]
        bare = i == 0 and isinstance(self.prompts.make(-1, 1), str)  # what is counted of one token is the template's
        record, body = self._prepare(-1 - i, request._replace(prompt=1) if bare else request)
        record.intended = self.loop.time()
        over: list[Record] = []
        self.pool.send(body, record, over.append)
        while not over:
            await asyncio.sleep(0.01)
            self.pool.expire(self.loop.time())
            if self.stop.is_set():
                raise KeyboardInterrupt
        if record.error and i == 0:
            where = self.endpoint.url
            if record.error.startswith("HTTP "):
                raise refused(where, int(record.error.split()[1]), record.detail)
            raise UserError(f"the first request to {where} failed: {record.error}: {record.detail}",
                            "check the address, --api and --model")  # fmt: skip
        if bare:
            self.template = max(0, (record.prompt_tokens or 1) - 1)

    async def _watch(self) -> None:
        """Periodically: timeouts, and updates of the progress bar."""
        while True:
            await asyncio.sleep(0.25)
            self.pool.expire(self.loop.time())
            note = f"{len(self.pool.in_flight)} under way" + (f", {self.failed} failed" if self.failed else "")
            self.progress({"step": self.finished, "steps": len(self.arrivals), "stage": note})


@contextmanager
def _interrupts(then: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls ``then``, and afterwards what it did before: asyncio's own handlers leave Python's default."""
    if threading.current_thread() is not threading.main_thread():  # others may not listen
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: then())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _raise_file_limit() -> None:
    """An open loop may have thousands of requests under way: as many descriptors as the system allows."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _quiet_memory() -> Iterator[None]:
    """No garbage collection during measurement: a pass over all records would delay some of them."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
