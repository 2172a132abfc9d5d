"""The process that an engine has to itself: it runs ahead of its server, which makes text of what it reports.

One thread computes; another reads what the server asks, and compiles grammars. Steps do not wait for the server, but
for room in the socket. When the server has gone, this process ends too, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.serve.engine_messages import Facts, Frames, Job, Kind, Unreadable, framed, unpack_request
from ridgeline.serve.grammar import Grammars
from ridgeline.serve.heap import one_heap
from ridgeline.serve.request import EngineRequest, OutputEvent
from ridgeline.serve.step_report import StepReport, pack
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.transfer.transfers import Transfers

log = logging.getLogger("ridgeline.serve")
READ = 1 << 20
"""Most bytes to read at once."""
LAST = 8.0
"""Seconds that the last step may take."""


class _Gone(Exception):
    """The server has gone."""


class EngineProcess:
    """The engine's side."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self._frames = server, Frames()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._stepped = threading.Event()
        """Set after the last step."""
        self._engine: Engine | None = None
        """None: it is loading, or sleeps."""
        self._transfers: Transfers | None = None
        self._registry: CollectorRegistry | None = None
        """Of what is transferred."""
        self._serves = self._draining = False
        self._began: float | None = None
        """When the running step began."""
        self._handled = 0
        self._waiting: list[str] = []
        """Requests that have not been scheduled."""
        self._lost: list[OutputEvent] = []
        """Of requests that could not be taken."""

    def run(self) -> int:
        """Serve until the server says so or has gone → the exit code."""
        messages = self._messages()
        _, contents = next(messages)
        job: Job = pickle.loads(contents)
        threading.Thread(target=self._read, args=(job, messages), name="commands", daemon=True).start()
        try:
            self._build(job)
            self._exchange(job)
        except UserError as e:
            self._send(Kind.REFUSED, pickle.dumps(e))
            return 2
        assert self._engine is not None
        self._serves = True
        self._send(Kind.READY, pickle.dumps(Facts.of(self._engine, self._transfers)))
        try:
            with job.within():
                while self._turn():
                    pass
        except _Gone:
            pass
        except Exception as e:
            log.exception("the engine failed")
            self._send(Kind.FAILED, f"{type(e).__name__}: {e}".encode())  # at once: the rest may take a while
            return 1
        finally:
            self._stepped.set()
            with contextlib.suppress(_Gone):
                self._send(Kind.CLOSING, b"")
            if self._transfers is not None:
                self._transfers.close()
            if self._engine is not None:
                self._engine.close()
        return 0

    def _build(self, job: Job) -> None:
        self._engine = job.build()
        # The queue is bounded by the server.
        self._engine.limits.max_waiting = self._engine.limits.max_waiting_tokens = None

    def _exchange(self, job: Job) -> None:
        """Exchange caches with other servers, if the engine does."""
        engine, options = self._engine, job.member
        if engine is None or not engine.role or options is None:
            return
        from prometheus_client import CollectorRegistry

        from ridgeline.serve.transfer.transfers import Transfers

        def alive() -> bool:
            return time.monotonic() - (self._began or math.inf) <= options.stall

        self._registry = CollectorRegistry()
        self._transfers = Transfers(engine, options, self._post, self._registry, lambda: self._draining, alive)

    def _post(self, call: Callable[[], None]) -> None:
        """Have the engine's thread make a call between two steps; from any thread."""
        with self._wake:
            self._inbox.append(call)
            self._wake.notify()

    # ---- what the server asks ----------------------------------------------------------------------------------------

    def _messages(self) -> Any:
        """The server's messages until it has gone."""
        while True:
            try:
                data = self._server.recv(READ)
            except OSError:
                return
            if not data:
                return
            yield from self._frames.feed(data)

    def _read(self, job: Job, messages: Any) -> None:
        try:
            self._listen(job, messages)
        except Exception:
            log.exception("a message of the server cannot be read")
        if not self._serves:
            os._exit(1)  # nothing else ends what is loading
        with self._wake:
            self._stop = True
            self._wake.notify()
        if not self._stepped.wait(LAST):
            log.error("the engine hangs in a step")
            os._exit(1)  # nothing else ends it

    def _listen(self, job: Job, messages: Any) -> None:
        """Take what the server says, until it ends the engine or has gone."""
        vocabulary: Vocabulary | None = None
        grammars: Grammars | None = None
        for kind, contents in messages:
            if kind is Kind.STOP:
                return
            if kind is Kind.VOCABULARY:
                vocabulary, ends = pickle.loads(contents)
                grammars = Grammars(vocabulary, ends)
                continue
            value = unpack_request(contents, vocabulary, grammars) if kind is Kind.ADD else pickle.loads(contents)
            self._post(partial(self._carry_out, job, kind, value))

    def _carry_out(self, job: Job, kind: Kind, value: Any) -> None:
        """What has been asked, on the engine's thread."""
        self._handled += 1
        if kind is Kind.CALL:
            self._answer(job, *value)
        elif kind is Kind.DRAIN:
            self._draining = True
        elif self._engine is None:
            return
        elif kind is Kind.ADD:
            self._add(value)
        elif kind is Kind.ABORT:
            self._engine.abort(value)
        elif kind is Kind.FINISH:
            self._engine.finish(*value)

    def _add(self, request: EngineRequest | Unreadable) -> None:
        assert self._engine is not None
        try:
            if isinstance(request, Unreadable):
                raise RuntimeError(request.error)
            self._engine.add(request)
            self._waiting.append(request.id)
        except Exception:
            log.exception("a request could not be added")
            outputs = request.outputs if isinstance(request, Unreadable) else request.sampling.n
            why = "the request could not be taken; the server's log says why"
            self._lost += [OutputEvent(request.id, i, finish="error", error=why) for i in range(outputs)]

    def _answer(self, job: Job, name: str, args: tuple[Any, ...]) -> None:
        """Call one of the methods below, and send what it returns or raises."""
        value: Any = None
        error: Exception | None = None
        try:
            value = getattr(self, f"_call_{name}")(job, *args)
        except UserError as e:
            error = e
        except Exception as e:
            log.exception("%s failed", name)
            error = RuntimeError(f"{type(e).__name__}: {e}")
        self._send(Kind.ANSWER, pickle.dumps((self._handled, value, error)))

    def _call_load_adapter(self, _: Job, name: str, folder: Path, replace: bool) -> None:
        self._awake().load_adapter(name, folder, replace)

    def _call_warm_up_adapters(self, _: Job) -> None:
        self._awake().warm_up_adapters()

    def _call_unload_adapter(self, _: Job, name: str) -> None:
        self._awake().unload_adapter(name)

    def _call_reset_prefix_cache(self, _: Job) -> int:
        return self._awake().reset_prefix_cache()

    def _call_release(self, _: Job) -> None:
        self._awake().release()
        self._engine = None
        self._waiting.clear()

    def _call_rebuild(self, job: Job) -> Facts:
        if self._engine is None:
            self._build(job)
        return Facts.of(self._awake(), self._transfers)

    def _call_transfer_metrics(self, _: Job) -> bytes:
        from prometheus_client import generate_latest

        return b"" if self._registry is None else generate_latest(self._registry)

    def _awake(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine sleeps")
        return self._engine

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Wait for something to do, and do it → whether to go on."""
        with self._wake:
            while not self._inbox and not self._stop and (self._engine is None or not self._engine.has_work()):
                self._wake.wait()
            if self._stop:
                return False
        while self._inbox:
            self._inbox.popleft()()
        if self._engine is None:
            self._send(Kind.HANDLED, pickle.dumps(self._handled))
        else:
            self._send(Kind.REPORT, pack(self._step(self._engine)))
        return True

    def _step(self, engine: Engine) -> StepReport:
        events, self._lost = self._lost, []
        began, seconds, started = time.monotonic(), 0.0, list[str]()
        if engine.has_work():
            self._began = began
            events += engine.step()
            self._began = None
            seconds = time.monotonic() - began
            if self._waiting:
                started = [request for request in self._waiting if engine.started(request)]
                left = set(self._waiting).difference(started)
                self._waiting = [request for request in self._waiting if request in left and request in engine.groups]
        exporting = engine.exports is not None and bool(engine.exports.open)
        return StepReport(events, engine.stats(), began, seconds, started, self._handled, engine.has_work(), exporting)

    def _send(self, kind: Kind, contents: bytes) -> None:
        try:
            self._server.sendall(framed(kind, contents))
        except OSError:
            raise _Gone from None


def main() -> None:
    """Entry point: the number of the socket to the server."""
    for one in (signal.SIGINT, signal.SIGTERM):  # the server drains, then says so
        signal.signal(one, lambda *_: None)
    one_heap()
    with contextlib.suppress(_Gone), socket.socket(fileno=int(sys.argv[1])) as server:
        code = EngineProcess(server).run()
        sys.exit(code)


if __name__ == "__main__":
    main()
