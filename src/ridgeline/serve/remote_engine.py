"""An engine in a process of its own, as the server sees it, and the loop that serves from it.

The engine runs ahead: it reports each step and goes on with the next, while this process makes text of the last one and
sends it. What finds a stop string here ends the output there; the tokens that it made meanwhile are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ridgeline.serve.engine_loop import EngineLoop
from ridgeline.serve.engine_messages import Facts, Frames, Job, Kind, framed, pack_request
from ridgeline.serve.output_stream import Failed
from ridgeline.serve.request import EngineRequest, Stats, check_served
from ridgeline.serve.step_report import StepReport, unpack
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.metrics import Metrics
    from ridgeline.serve.queue_limits import QueueLimits
    from ridgeline.serve.transfer.member import MemberOptions

log = logging.getLogger("ridgeline.serve")
_READ = 1 << 20
_METRICS = 5.0
"""Seconds to wait for what the engine counts."""
_CLOSE = 10.0
"""Seconds that the last step may take."""
_START = (
    "import sys; sys.path += [sys.path.pop(0)] if sys.path[0] == '' else [];"  # the current folder hides nothing
    " from ridgeline.serve.engine_process import main; main()"
)


class EngineLost(RuntimeError):
    """The engine's process has ended."""


@dataclass(frozen=True)
class Pool:
    """The size of the cache."""

    count: int
    size: int


class RemoteEngine:
    """Starts the process; :meth:`wait_ready` waits until it has loaded the model. Methods are for one thread at a time,
    but for :meth:`rouse` and :attr:`age`."""

    def __init__(
        self, build: Callable[[], Engine], within: Callable[[], AbstractContextManager[None]] = nullcontext,
        member: MemberOptions | None = None,
    ) -> None:  # fmt: skip
        """``build`` makes the engine there, and again after it slept, and it serves ``within`` a context: both go by
        their names. ``member``: how it exchanges caches with other servers, where its plan does."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._told, self._tell = os.pipe()
        for end in (self._told, self._tell):
            os.set_blocking(end, False)
        self._news = selectors.DefaultSelector()
        self._news.register(self._socket, selectors.EVENT_READ)
        self._news.register(self._told, selectors.EVENT_READ)
        self._frames = Frames()
        self._early: list[tuple[Kind, bytes]] = []
        """What came together with the first message."""
        self._outbox: list[bytes] = []
        self._reports: deque[StepReport] = deque()
        self._answers: deque[tuple[Any, Exception | None]] = deque()
        self._sent = self._handled = 0
        self._busy = False
        self._since: float | None = None
        """When the engine last said something, while it has something to do."""
        self._patient = False
        """Whether it loads something now, which may take long."""
        self.exporting = False
        """Whether it computes prompts for other servers."""
        self._lost = self._closed = False
        self._reason = "the engine's process has ended"
        self._ready = self._closing = False
        """Whether the model is loaded, and whether the last step has ended."""
        self._has_vocabulary = False
        self.vocabulary: Vocabulary | None = None
        """What grammars and stop strings are about."""
        self._adapters: set[str] = set()
        self._socket.sendall(framed(Kind.JOB, pickle.dumps(Job(build, within, member))))

    # ---- its start and end -------------------------------------------------------------------------------------------

    def wait_ready(self) -> RemoteEngine:
        """Wait until the model is loaded. Raises the :class:`UserError` that it was refused with, or one that says how
        the process ended."""
        try:
            kind, contents = self._first()
        except EngineLost as e:
            self.close()
            raise UserError(f"{e} while it loaded the model", "see what it printed; without a word, memory may have run"
                            " out: try a smaller --kv-cache or fewer bits") from None  # fmt: skip
        except BaseException:
            self.close(0.0)
            raise
        if kind is Kind.REFUSED:
            self.close()
            raise pickle.loads(contents)
        self._take(pickle.loads(contents))
        self._ready = True
        return self

    def _first(self) -> tuple[Kind, bytes]:
        while not self._early:
            self._early += self._frames.feed(self._received(0))
        return self._early.pop(0)

    def _take(self, facts: Facts) -> None:
        self.spec, self.eos, self.max_model_len = facts.spec, facts.eos, facts.max_model_len
        self.blocks, self.limits = Pool(facts.blocks, facts.block_size), facts.limits
        self.adapters = self._adapters if facts.adapters else None
        self._ordered, self._stats, self._held = facts.ordered, facts.stats, facts.held
        self._labels = facts.labels
        self.role, self.transfer_port, self.fingerprint = facts.role, facts.transfer_port, facts.fingerprint

    def close(self, seconds: float = _CLOSE) -> bool:
        """End the process → whether it ended well. Its last step may take ``seconds``; then what it keeps of the cache
        is written, however long that takes."""
        if self._closed:
            return True
        failed, self._closed, self._lost = self._lost, True, True
        with contextlib.suppress(OSError):
            self._socket.sendall(framed(Kind.STOP, b""))
        hangs = not self._stepped(seconds)
        if hangs:
            if seconds:
                log.error("the engine hangs in a step: killed")
            self.process.kill()
        self.process.wait()
        self._socket.close()
        self._news.close()
        for end in (self._told, self._tell):
            os.close(end)
        code = self.process.returncode
        if code and self._ready and not (failed or hangs):
            log.error("the engine's process ended with exit code %d", code)
        return not code

    def _stepped(self, seconds: float) -> bool:
        """Whether the engine has ended its last step within ``seconds``."""
        until = time.monotonic() + seconds
        if self._closing:
            return True
        try:
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                data = self._socket.recv(_READ)
                if not data or any(kind is Kind.CLOSING for kind, _ in self._frames.feed(data)):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises :class:`ridgeline.serve.request.Invalid` for one that can never be served."""
        if self._lost:
            raise EngineLost(self._reason)
        check_served(request, self.spec, self.max_model_len, self.adapters, self._ordered)
        contents, needs = pack_request(request, self.vocabulary)
        if needs and not self._has_vocabulary:
            self._outbox.append(framed(Kind.VOCABULARY, pickle.dumps((self.vocabulary, self.eos))))
            self._has_vocabulary = True
        self._ask(Kind.ADD, contents)

    def abort(self, request_id: str) -> None:
        """Cancel a request, before the step after the one that runs."""
        self._ask(Kind.ABORT, pickle.dumps(request_id))

    def finish(self, request_id: str, index: int) -> None:
        """End one output: its reader has found that the text is complete."""
        self._ask(Kind.FINISH, pickle.dumps((request_id, index)))

    def drain(self) -> None:
        """Compute no more prompts for other servers."""
        self._ask(Kind.DRAIN, pickle.dumps(None))

    def _ask(self, kind: Kind, contents: bytes) -> None:
        """Send with the next :meth:`wait`."""
        self._sent += 1
        self._outbox.append(framed(kind, contents))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: Path, replace: bool = False) -> None:
        """As :meth:`ridgeline.serve.engine.Engine.load_adapter`."""
        self._call("load_adapter", name, folder, replace, patient=True)
        self._adapters.add(name)

    def warm_up_adapters(self) -> None:
        """As :meth:`ridgeline.serve.engine.Engine.warm_up_adapters`."""
        self._call("warm_up_adapters", patient=True)

    def unload_adapter(self, name: str) -> None:
        """As :meth:`ridgeline.serve.engine.Engine.unload_adapter`."""
        self._call("unload_adapter", name)
        self._adapters.discard(name)

    def reset_prefix_cache(self) -> int:
        """As :meth:`ridgeline.serve.engine.Engine.reset_prefix_cache`."""
        return int(self._call("reset_prefix_cache"))

    def release(self) -> None:
        """As :meth:`ridgeline.serve.engine.Engine.release`; the process stays."""
        self._call("release", patient=True)
        self._adapters.clear()
        self._reports.clear()  # of requests that have gone
        self._busy, self._since = False, None

    def rebuild(self) -> RemoteEngine:
        """Make the engine again, after its release. Raises :class:`UserError`, and it sleeps on."""
        self._take(self._call("rebuild", patient=True))
        return self

    def transfer_metrics(self) -> bytes:
        """What was exchanged with other servers, as Prometheus reads it."""
        return bytes(self._call("transfer_metrics"))

    def _call(self, name: str, *args: Any, patient: bool = False) -> Any:
        """What a method of the engine returns or raises; between two steps."""
        if self._lost:
            raise EngineLost(self._reason)
        self._ask(Kind.CALL, pickle.dumps((name, args)))
        self._flush()
        self._patient = patient
        try:
            while not self._answers:
                self._receive(0)
        finally:
            self._patient = False
        value, error = self._answers.popleft()
        if error is not None:
            raise error
        return value

    # ---- steps -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Send what was asked, and wait for news, or until :meth:`rouse`. Raises :class:`EngineLost`."""
        self._flush()
        if self._early:
            self._receive(0)
        if self._reports:
            return
        if self._lost:  # as a call has learned
            raise EngineLost(self._reason)
        ready = {key.fd for key, _ in self._news.select()}
        if self._told in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._told, 4096)
        if self._socket.fileno() in ready:
            self._receive(socket.MSG_DONTWAIT)

    def rouse(self) -> None:
        """End a :meth:`wait`, or the next one at once; from any thread."""
        if not self._closed:
            with contextlib.suppress(OSError):  # it is told already, or closed meanwhile
                os.write(self._tell, b".")

    def report(self) -> StepReport | None:
        """The next step that has been reported."""
        if not self._reports:
            return None
        found = self._reports.popleft()
        self._stats = found.stats
        return found

    def stats(self) -> Stats:
        """As of the last report."""
        return self._stats

    def held(self) -> dict[str, float]:
        """As :meth:`ridgeline.serve.engine.Engine.held`."""
        return self._held

    def labels(self) -> list[str]:
        """As :meth:`ridgeline.serve.engine.Engine.labels`."""
        return self._labels

    @property
    def age(self) -> float:
        """Seconds for which the engine has said nothing though it has something to do."""
        since = self._since
        return 0.0 if since is None or self._patient else time.monotonic() - since

    def _flush(self) -> None:
        if not self._outbox:
            return
        parcel, self._outbox = b"".join(self._outbox), []
        self._since = self._since or time.monotonic()
        with contextlib.suppress(OSError):  # the next reading says that it has gone
            self._socket.sendall(parcel)

    def _receive(self, flags: int) -> None:
        early, self._early = self._early, []
        failed = ""
        for kind, contents in early or self._frames.feed(self._received(flags)):
            if kind is Kind.REPORT:
                report = unpack(contents)
                self._handled, self._busy, self.exporting = report.handled, report.busy, report.exporting
                self._reports.append(report)
            elif kind is Kind.ANSWER:
                self._handled, value, error = pickle.loads(contents)
                self._answers.append((value, error))
            elif kind is Kind.HANDLED:
                self._handled, self._busy = pickle.loads(contents), False
            elif kind is Kind.FAILED:
                failed = contents.decode()
            elif kind is Kind.CLOSING:
                self._closing = True
        if failed:
            raise self._ended(failed)
        self._since = time.monotonic() if self._busy or self._sent > self._handled else None

    def _received(self, flags: int) -> bytes:
        """What has arrived. Raises :class:`EngineLost`."""
        try:
            data = self._socket.recv(_READ, flags)
        except ConnectionError:
            data = b""
        if data:
            return data
        if self._lost:  # it has said why
            raise EngineLost(self._reason)
        try:
            code = self.process.wait(_CLOSE)
        except subprocess.TimeoutExpired:
            raise self._ended("the engine's process has closed its connection") from None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise self._ended(f"the engine's process {how}")

    def _ended(self, reason: str) -> EngineLost:
        """What to raise from now on."""
        self._lost, self._reason, self._since = True, reason, None
        return EngineLost(reason)


class ProcessLoop(EngineLoop):
    """Serves from an engine in a process of its own: steps are its reports."""

    def __init__(self, engine: RemoteEngine, limits: QueueLimits, metrics: Metrics) -> None:
        super().__init__(cast("Engine", engine), limits, metrics)  # all that a loop asks of an engine, it has
        self._remote = engine
        self.rebuild = cast("Callable[[], Engine]", engine.rebuild)

    @property
    def step_age(self) -> float:
        """Seconds that the running step has taken so far."""
        return self._remote.age

    @property
    def _exporting(self) -> bool:
        return self._remote.exporting

    async def engine_metrics(self) -> bytes:
        """As :meth:`EngineLoop.engine_metrics`; nothing where the engine does not answer soon."""
        if not self._remote.role:
            return b""
        try:
            answer = await asyncio.wait_for(self.ask(lambda _: self._remote.transfer_metrics()), _METRICS)
        except (asyncio.TimeoutError, EngineLost, Failed):
            return b""
        return bytes(answer)

    async def drain(self, seconds: float) -> None:
        """As :meth:`EngineLoop.drain`."""
        self.post(self._remote.drain)
        await super().drain(seconds)

    def _rouse(self) -> None:
        self._remote.rouse()

    def _rest(self) -> None:
        self._remote.wait()

    def _step(self) -> StepReport | None:
        return self._remote.report()
