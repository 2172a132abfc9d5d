"""The one thread that owns the engine: it takes requests and sends text to the streams on the event loop.

Ownership: the engine, its jobs and their text belong to the thread; streams belong to the event loop. What crosses is
an inbox of calls (under a lock) one way, and one callback per step with everything that is new the other way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.serve.detokenize import Delta, ServeJob
from ridgeline.serve.output_stream import Failed, OutputStream
from ridgeline.serve.queue_limits import QueueLimits, QueueSpeed
from ridgeline.serve.request import Busy, Invalid, OutputEvent, Stats, Vector
from ridgeline.serve.step_report import StepReport
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.metrics import Metrics
    from ridgeline.serve.transfer.member import FleetMember

log = logging.getLogger("ridgeline.serve")
ASLEEP = "the server sleeps until POST /wake_up", 5.0
"""Why a request is refused then, and seconds after which to retry."""


@dataclass
class _Queue:
    """Requests that have not been scheduled: (sequences, prompt tokens) by id."""

    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def totals(self) -> tuple[int, int]:
        return sum(n for n, _ in self.waiting.values()), sum(t for _, t in self.waiting.values())


class EngineLoop:
    """Runs an engine in a thread of its own. Methods are for the event loop's thread, but for those named ``_…``."""

    def __init__(self, engine: Engine, limits: QueueLimits, metrics: Metrics) -> None:
        self.engine, self.limits, self.metrics = engine, limits, metrics
        # The queue is bounded here, before the inbox: the engine's own bounds would come too late.
        engine.limits.max_waiting = engine.limits.max_waiting_tokens = None
        self.stats: Stats = engine.stats()
        self.failure: Exception | None = None
        self.draining = False
        self.member: FleetMember | None = None
        """Where the server exchanges the caches of prompts with others."""
        self.on_failure: Callable[[], None] = lambda: None
        self.rebuild: Callable[[], Engine] | None = None
        """Makes the engine again, after it slept; None: it cannot sleep."""
        self.asleep = False
        """Whether weights and pool are freed, until :meth:`wake`."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._queue = _Queue()
        self.speed = QueueSpeed()
        self._streams: dict[str, OutputStream] = {}
        self._patience = 1.0
        self._step_began: float | None = None
        self._outgoing: list[tuple[OutputStream, Delta | Exception | None]] = []

    # ---- the event loop's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start serving, from within the event loop that reads the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return not self.draining and not self.asleep and self.alive

    @property
    def alive(self) -> bool:
        """Whether the engine works: its thread runs, and its step is not overdue."""
        return self.failure is None and self._thread.is_alive() and self.step_age <= self.limits.stall

    @property
    def step_age(self) -> float:
        """Seconds that the running step has taken so far."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def open_streams(self) -> int:
        """Number of requests with a waiting reader."""
        return len({id(stream) for stream in list(self._streams.values())})

    @property
    def _exporting(self) -> bool:
        """Whether prompts are being computed for other servers."""
        return self.engine.exports is not None and bool(self.engine.exports.open)

    @property
    def queued(self) -> tuple[int, int]:
        """Sequences and prompt tokens that wait to be scheduled."""
        with self._wake:
            return self._queue.totals

    async def submit(self, jobs: Sequence[ServeJob]) -> OutputStream:
        """Queue ``jobs`` and wait until the engine has taken them. Raises :class:`Busy`, Invalid or :class:`Failed`."""
        stream = OutputStream(jobs, self._loop)
        with self._wake:
            self._admit(jobs)
            self._queue.waiting.update({j.request.id: (j.sequences, len(j.request.prompt)) for j in jobs})
            self._streams.update({j.request.id: stream for j in jobs})
            self._inbox.append(lambda: self._add(stream))
            self._rouse()
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.cancel(stream)
            raise
        return stream

    async def vectors(self, jobs: Sequence[ServeJob]) -> list[Vector]:
        """What is pooled of each job's prompt. More than the queue takes at once go in pieces, of which all but the
        first wait for room. Raises as :meth:`submit`, or :class:`Failed`."""
        found: list[Vector] = []
        for piece in self._pieces(jobs):
            stream = await self._when_room(piece) if found else await self.submit(piece)
            by_job: dict[int, Vector] = {}
            try:
                async for delta in stream:
                    if delta.embedding is None:
                        raise Failed(delta.error or "an input could not be read")
                    by_job[delta.job] = delta.embedding
            finally:
                self.cancel(stream)
            found += [by_job[job.ordinal] for job in piece]
        return found

    def _pieces(self, jobs: Sequence[ServeJob]) -> Iterator[list[ServeJob]]:
        """Jobs in the fewest pieces within the queue's limits."""
        most, most_tokens = (limit or sys.maxsize for limit in (self.limits.queued_requests, self.limits.queued_tokens))
        piece: list[ServeJob] = []
        tokens = 0
        for job in jobs:
            size = len(job.request.prompt)
            if piece and (len(piece) >= most or tokens + size > most_tokens):
                yield piece
                piece, tokens = [], 0
            piece.append(job)
            tokens += size
        yield piece

    async def _when_room(self, jobs: Sequence[ServeJob]) -> OutputStream:
        """:meth:`submit` as soon as the queue has room, for as long as a request may wait there."""
        until = math.inf if self.limits.first_token is None else time.monotonic() + self.limits.first_token
        while True:
            try:
                return await self.submit(jobs)
            except Busy:
                if self.draining or time.monotonic() > until:
                    raise
            await asyncio.sleep(0.05)

    def cancel(self, stream: OutputStream) -> None:
        """Abort the unfinished outputs of ``stream``; their blocks are free before the next step."""
        left = [job.request.id for job in stream.jobs.values() if job.open]
        if left and self.failure is None:
            self.metrics.disconnected.inc()
            self.post(lambda: self._abort(left))

    async def ask(self, function: Callable[[Engine], Any]) -> Any:
        """``function(engine)``, between two steps."""
        answer = self._loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(value)

        def call() -> None:
            value, error = None, None
            try:
                value = function(self.engine)
            except Exception as e:
                error = e
            self._loop.call_soon_threadsafe(settle, value, error)

        if self.failure is not None:
            raise Failed("the engine has stopped")
        self.post(call)
        return await answer

    async def engine_metrics(self) -> bytes:
        """What is counted in the engine's own process, as Prometheus reads it."""
        return b""

    async def sleep(self) -> None:
        """Free the weights and the pool, until :meth:`wake`. Raises :class:`Busy` while requests are served, and
        :class:`Invalid` where this server cannot sleep."""
        if self.rebuild is None:
            raise Invalid("level", "does not apply: this server cannot load its model again", "end it")
        if self.member is not None:
            raise Invalid("level", "does not apply to servers that send and receive caches", "drain it and end it")

        def sleep(engine: Engine) -> None:
            if not self.asleep:
                if self._streams:  # the engine may have ended what is not sent yet
                    raise Busy(f"{len(self._streams)} requests are being served", retry_after=1.0)
                engine.release()
                self.asleep = True

        await self.ask(sleep)

    async def wake(self, adapters: Mapping[str, str]) -> list[str]:
        """Make the engine again, with ``adapters`` (folders by name) → those that could not be loaded. Does nothing
        where it does not sleep. Raises :class:`Busy` where the checkpoint cannot be read any more."""
        lost: list[str] = []

        def wake(engine: Engine) -> None:
            if not self.asleep or self.rebuild is None:
                return
            try:
                made = self.rebuild()
            except UserError as e:
                log.error("the server cannot wake: %s", e.what)
                raise Busy(f"the server cannot wake: {e.what}", 5.0) from None
            made.limits.max_waiting = made.limits.max_waiting_tokens = None
            for name, folder in adapters.items():
                try:
                    made.load_adapter(name, Path(folder))
                except UserError as e:  # its folder may have gone
                    log.warning("adapter %s is not served any more: %s", name, e.what)
                    lost.append(name)
            if len(adapters) > len(lost):
                made.warm_up_adapters()
            self.engine, self.stats, self.asleep = made, made.stats(), False

        await self.ask(wake)
        return lost

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, let the running ones finish for this long, then abort the rest."""
        self.draining = True
        until = time.monotonic() + seconds
        while (self.open_streams or self._exporting) and time.monotonic() < until and self.alive:
            await asyncio.sleep(0.02)
        if left := list(self._streams):
            log.warning("%d requests aborted: not finished within %g s", len(left), seconds)
            self.post(lambda: self._abort(left))
            while self.open_streams and self.alive:
                await asyncio.sleep(0.02)

    def stop(self, seconds: float = 5.0) -> bool:
        """Stop the thread after its current step → whether it ended within ``seconds``."""
        with self._wake:
            self._stop = True
            self._rouse()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _admit(self, jobs: Sequence[ServeJob]) -> None:
        if self.failure is not None:
            raise Failed("the engine has stopped")
        if self.draining:
            raise Busy("the server is shutting down", 5.0)
        if self.asleep:
            raise Busy(*ASLEEP)
        sequences = sum(job.sequences for job in jobs)
        self.bound(sequences)
        tokens = sum(len(job.request.prompt) for job in jobs)
        most = self.limits.queued_tokens
        if most is not None and len(jobs) > 1 and tokens > most:
            raise Invalid("prompt", f"has {tokens} tokens in all, of {most} at most", "ask in several requests")
        waiting = self._queue.totals
        expected = self.speed.seconds(waiting[1] + tokens) if waiting[0] else 0.0  # or it is the next
        if self.limits.ttft is not None and expected > self.limits.ttft:
            self.metrics.rejected.inc()
            what = f"a first token is expected in {expected:.3g} s, and the limit is {self.limits.ttft:g} s"
            raise Busy(what, min(60.0, max(1.0, expected - self.limits.ttft)))
        if not waiting[0]:  # a single prompt has the context for its bound
            return
        for number, limit, what in ((waiting[0] + sequences, self.limits.queued_requests, "outputs"),
                                    (waiting[1] + tokens, most, "prompt tokens")):  # fmt: skip
            if limit is not None and number > limit:
                self.metrics.rejected.inc()
                raise Busy(
                    f"the queue is full: {number} {what}, of {limit} at most", min(60.0, max(1.0, self._patience))
                )

    def bound(self, outputs: int) -> None:
        """Raise :class:`Invalid` for a request of more outputs than the queue ever takes."""
        most = self.limits.queued_requests
        if most is not None and outputs > most:
            raise Invalid("n", f"makes {outputs} outputs of all prompts, of {most} at most", "ask in several requests")

    def post(self, call: Callable[[], None]) -> None:
        """Have the engine's thread make a call between two steps; from any thread."""
        with self._wake:
            self._inbox.append(call)
            self._rouse()

    # ---- the engine's side -------------------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """End :meth:`_rest`; with the lock held."""
        self._wake.notify()

    def _rest(self) -> None:
        """Wait until there is something to do."""
        with self._wake:
            if not self._inbox and (self.asleep or not self.engine.has_work()) and not self._stop:
                self._wake.wait()

    def _step(self) -> StepReport | None:
        """A step of the engine, if it has work."""
        if not self.engine.has_work():
            return None
        self._step_began = began = time.monotonic()
        events = self.engine.step()
        self._step_began = None
        with self._wake:
            waiting = list(self._queue.waiting)
        started = [request for request in waiting if self.engine.started(request)]
        return StepReport(events, self.engine.stats(), began, time.monotonic() - began, started)

    def _run(self) -> None:
        try:
            while not self._stop:
                self._rest()
                self._take_calls()
                if self.asleep:
                    self._send()
                    continue
                self._give_up()
                if (report := self._step()) is not None:
                    self._take(report)
                self.stats = self.engine.stats()
                self._send()
        except Exception as e:
            log.exception("the engine failed")
            with self._wake:
                self.failure = e  # nothing is queued after this
                lost = {id(stream): stream for stream in self._streams.values()}
            self._outgoing += [(s, Failed("the engine failed; the server's log says why")) for s in lost.values()]
            self._forget(*list(self._streams))
            with contextlib.suppress(Exception):
                self._take_calls()  # calls are answered by the engine itself
            self._send()
            self._loop.call_soon_threadsafe(self.on_failure)

    def _take(self, report: StepReport) -> None:
        """What a step has done."""
        stats = report.stats
        read = stats.prompt_tokens - self.stats.prompt_tokens
        found = stats.cached_tokens - self.stats.cached_tokens
        self.metrics.step.observe(read + found + stats.generated_tokens - self.stats.generated_tokens)
        if stats.waiting or self.speed.blocked:  # it computed as many prompts as it could
            self.speed.observe(read, report.seconds)
        for event in report.events:
            self._read(event, report.began)
        self._note_started(report)

    def _take_calls(self) -> None:
        while True:
            with self._wake:
                if not self._inbox:
                    return
                call = self._inbox.popleft()
            call()

    def _add(self, stream: OutputStream) -> None:
        done: list[str] = []
        try:
            if self.asleep:  # since this request was queued
                raise Busy(*ASLEEP)
            for job in stream.jobs.values():
                self.engine.add(job.request)
                done.append(job.request.id)
        except Exception as e:
            for request in done:
                self.engine.abort(request)
            self._forget(*stream.jobs)
            if not isinstance(e, UserError):
                log.exception("a request could not be added")
                e = Failed("the request could not be taken; the server's log says why")
            self._outgoing.append((stream, e))
        else:
            self._outgoing.append((stream, None))

    def _abort(self, requests: Sequence[str]) -> None:
        for request in requests:
            self.engine.abort(request)
            stream = self._streams.get(request)
            if stream is None:
                continue
            job = stream.jobs[request]
            for index in sorted(job.open):
                if (delta := job.read(OutputEvent(request, index, finish="abort"))) is not None:
                    self._outgoing.append((stream, delta))
            self.metrics.finished.labels("abort").inc()
            self._forget(request)

    def _give_up(self) -> None:
        """Fail requests that have waited too long to be scheduled."""
        if self.limits.first_token is None:
            return
        with self._wake:
            late = [(r, self._streams[r]) for r in self._queue.waiting if r in self._streams]
        now = time.monotonic()
        for request, stream in late:
            if stream.scheduled is not None or now - stream.submitted <= self.limits.first_token:
                continue
            if request in self._streams:
                error = Busy(f"no token within {self.limits.first_token:g} s", max(1.0, self._patience))
                self._outgoing.append((stream, error))
                for other in stream.jobs:
                    self.engine.abort(other)
                self._forget(*stream.jobs)
                self.metrics.finished.labels("timeout").inc()

    def _note_started(self, report: StepReport) -> None:
        """Remove the requests from the queue that a step has scheduled."""
        with self._wake:
            for request in report.started:
                if self._queue.waiting.pop(request, None) is not None:
                    stream = self._streams[request]
                    stream.scheduled = stream.scheduled or report.began

    def _read(self, event: OutputEvent, began: float) -> None:
        """An event of the step that ``began`` then."""
        stream = self._streams.get(event.request)
        if stream is None:  # aborted
            return
        job, now = stream.jobs[event.request], time.monotonic()
        if event.request not in stream.first and (event.tokens or event.embedding):
            stream.first[event.request] = now
            self._patience += 0.1 * (now - stream.submitted - self._patience)
            self.metrics.first_token.observe(now - stream.submitted)
        stream.last = now
        delta = job.read(event)
        if delta is None:
            return
        if delta.finish and event.finish is None:  # the text found a stop string
            self.engine.finish(event.request, event.index)
        self.metrics.tokens.inc(len(event.tokens))
        at = (event.request, event.index)
        for _ in event.tokens if at in stream.previous else event.tokens[1:]:
            self.metrics.gap.observe((now - stream.previous.get(at, now)) / len(event.tokens))
        if event.tokens:
            stream.previous[at] = now
        self._outgoing.append((stream, delta))
        if delta.finish:
            self.metrics.output(delta, stream.first.get(event.request, now), now)
        if not job.open:
            first = stream.first.get(event.request, now)
            scheduled = min(stream.scheduled or began, first)
            self.metrics.request(delta, job.request, (stream.submitted, scheduled, first, now))
            self._forget(event.request)

    def _forget(self, *requests: str) -> None:
        with self._wake:
            for request in requests:
                self._streams.pop(request, None)
                self._queue.waiting.pop(request, None)

    def _send(self) -> None:
        """Send all deltas to the event loop in one call."""
        if not self._outgoing:
            return
        parcel, self._outgoing = self._outgoing, []
        try:
            self._loop.call_soon_threadsafe(_deliver, parcel)
        except RuntimeError:  # the event loop has stopped, and so have all readers
            self._stop = True


def _deliver(parcel: list[tuple[OutputStream, Delta | Exception | None]]) -> None:
    for stream, news in parcel:
        if isinstance(news, Delta):
            stream.put(news)
        elif news is not None:
            stream.fail(news)
        elif not stream.accepted.done():
            stream.accepted.set_result(None)
