"""The thread on which a peer computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from ridgeline.swarm.span import Held, SpanEngine

MOST_ROWS = 4096
"""Rows of one packed step at most, and of one message."""

Step = tuple[SpanEngine, Held, Tensor, Future[Tensor]]
"""The next rows of a sequence, and what comes out of them."""


class Worker:
    """The thread that computes. Steps of sequences that wait for the same blocks go in one batch."""

    def __init__(self) -> None:
        self.batches: dict[int, int] = {}
        """How many batches had how many sequences."""
        self._steps: list[Step] = []
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
            batch = [item for item in batch if item[3].set_running_or_notify_cancel()]
            for function, found in calls:
                _settle(found, function)
            if batch:
                self._compute(batch)

    def _take(self) -> list[Step]:
        """The waiting steps that fit into one batch with the first."""
        batch: list[Step] = []
        rest: list[Step] = []
        rows = 0
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

    def _compute(self, batch: list[Step]) -> None:
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
    if not found.set_running_or_notify_cancel():  # whoever asked has gone
        return
    try:
        found.set_result(function())
    except Exception as e:
        found.set_exception(e)
