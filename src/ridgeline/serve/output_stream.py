"""The outputs of one request on their way from the engine's thread to the event loop's readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from ridgeline.serve.detokenize import Delta, ServeJob


class Failed(Exception):
    """The engine failed, or lost a request: not the client's fault."""


class OutputStream:
    """The outputs of the jobs of one request, as they arrive. Deltas are merged while the reader is slow."""

    def __init__(self, jobs: Sequence[ServeJob], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = {job.request.id: job for job in jobs}
        self.submitted = time.monotonic()
        self.first: dict[str, float] = {}
        self.previous: dict[tuple[str, int], float] = {}
        """When the last token of each output came."""
        self.last = self.submitted
        """When its last token came."""
        self.scheduled: float | None = None
        """When the first of its outputs was scheduled (the engine's thread says so)."""
        self._open = {(job.ordinal, i) for job in jobs for i in job.open}
        self._fresh: dict[tuple[int, int], Delta] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self.accepted: asyncio.Future[None] = loop.create_future()

    def put(self, delta: Delta) -> None:
        """Add a delta of one output (on the event loop)."""
        key = (delta.job, delta.index)
        if key in self._fresh:
            self._fresh[key].add(delta)
        else:
            self._fresh[key] = delta
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error (on the event loop)."""
        self._error = self._error or error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # a reader that has gone does not retrieve it
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until every output has ended. Raises the error that the stream failed with."""
        while self._open:
            await self._ready.wait()
            self._ready.clear()
            fresh, self._fresh = self._fresh, {}
            for key, delta in fresh.items():
                if delta.finish:
                    self._open.discard(key)
                yield delta
            if self._error is not None and self._open:
                raise self._error
