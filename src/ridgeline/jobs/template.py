"""Ranks forked from one process that has imported PyTorch, so that each starts in milliseconds instead of seconds.

``python -m ridgeline.jobs.template`` holds the imports and reads requests from a Unix socket on its standard input: a
job's file, an environment, and two file descriptors. Linux without a GPU only: elsewhere ranks are started anew, as a
process that has initialized CUDA cannot be forked. Nothing here imports torch but :func:`serve`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, TextIO

from ridgeline.imports import uncollected
from ridgeline.jobs.job import MODES, LaunchJob
from ridgeline.spec.workload import Training

_READ_AT_IMPORT = (
    "ATEN_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHON", "TORCH", "TRITON_",
)  # fmt: skip
"""Variables that libraries read when they are loaded: a template serves jobs that agree in these."""
_SET_LATER = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Except for the number of threads, which a rank sets itself."""
_LATER = ("torch._dynamo", "torch.distributed.checkpoint.state_dict")
"""What PyTorch's optimizers and its sharded tensors import when they are made, and what checkpoints need: a second of
each rank's time."""
_LARGEST = 1 << 20
"""Bytes of a request."""


class ForkedRank:
    """A running rank: the part of :class:`subprocess.Popen` that a launcher needs."""

    def __init__(self, template: RankTemplate, pid: int, stdout: TextIO | None) -> None:
        self.template, self.pid, self.stdout = template, pid, stdout

    @property
    def returncode(self) -> int | None:
        """Exit code, minus the signal's number for a killed rank; None while it runs."""
        lost = -signal.SIGTERM if self.template.dead else None  # a template's ranks end with it
        return self.template.codes.get(self.pid, lost)

    def poll(self) -> int | None:
        """:attr:`returncode`, looked up now."""
        self.template.update()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises :class:`subprocess.TimeoutExpired`."""
        start = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - start >= timeout:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class RankTemplate:
    """The process that ranks are forked from; it ends with this one, and its ranks with it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended, by process."""
        self.dead = False
        self.lock = threading.RLock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.jobs.template"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip

    def fork(self, file: Path, mode: str, environment: dict[str, str], stdout: int, stderr: int) -> int:
        """Start a rank of the job in ``file`` → its process. Raises :class:`OSError` when the template cannot."""
        request = {"file": str(file), "mode": mode, "environment": environment, "cwd": os.getcwd(),
                   "cores": sorted(os.sched_getaffinity(0))}  # fmt: skip
        with self.lock:
            socket.send_fds(self.socket, [json.dumps(request).encode()], [stdout, stderr])
            while "code" in (answer := self._receive()):
                self.codes[answer["pid"]] = answer["code"]
            pid: int = answer["pid"]
            if not pid:
                raise OSError("the template process cannot fork")
            self.codes.pop(pid, None)  # an earlier rank's, whose number it has
        return pid

    def update(self) -> None:
        """Record which ranks have exited."""
        with self.lock:
            try:
                while not self.dead and select.select([self.socket], [], [], 0)[0]:
                    answer = self._receive()
                    self.codes[answer["pid"]] = answer["code"]
            except OSError:
                self.dead = True

    def _receive(self) -> dict[str, int]:
        data = self.socket.recv(_LARGEST)
        if not data:
            raise OSError("the template process has ended")
        answer: dict[str, int] = json.loads(data)
        return answer


_templates: dict[tuple[int, tuple[tuple[str, str], ...]], RankTemplate] = {}
"""By this process, as a fork of it must not share them, and by what libraries read when they are loaded."""


def start_rank(file: Path, mode: str, environment: dict[str, str], sink: IO[str], pipe: bool) -> ForkedRank:
    """A rank of the job in ``file``; its output goes to ``sink``, or its standard output to a pipe.

    Raises :class:`OSError` where ranks cannot be forked.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""  # which AMD's libraries read too
    gpu = not hidden and (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists())
    if gpu or not sys.platform.startswith("linux"):
        raise OSError("ranks that may use a GPU are not forked")
    read_early = sorted(i for i in environment.items() if i[0].startswith(_READ_AT_IMPORT) and i[0] not in _SET_LATER)
    key = (os.getpid(), tuple(read_early))
    template = _templates.get(key)
    if template is None or template.process.poll() is not None:
        template = _templates[key] = RankTemplate(environment)
    read, write = os.pipe() if pipe else (-1, os.dup(sink.fileno()))
    try:
        pid = template.fork(file, mode, environment, write, sink.fileno())
    except BaseException as e:
        _templates.pop(key, None)
        if not isinstance(e, OSError):  # interrupted: its answer would be read as that of the next request
            template.process.kill()
        if pipe:
            os.close(read)
        raise
    finally:
        os.close(write)
    return ForkedRank(template, pid, os.fdopen(read, encoding="utf-8") if pipe else None)


def serve() -> None:
    """Fork a rank for each request on standard input and report when it exits, until standard input is closed."""
    with uncollected():
        from ridgeline.jobs import worker

    requests = socket.socket(fileno=os.dup(0))
    wake_reader, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may be sent to all processes: its ranks save first
    watched: list[Any] = [requests, wake_reader]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if wake_reader in ready:
            os.read(wake_reader, 1024)
            _report_exits(requests)
        if requests not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 2)
        if not data:
            return
        request = json.loads(data)
        with contextlib.suppress(Exception), uncollected():  # the rank will report what is wrong
            resolve_name(MODES[request["mode"]][1])
            experiment = LaunchJob.from_json(Path(request["file"]).read_text(encoding="utf-8")).experiment
            for name in _LATER if experiment and isinstance(experiment.workload, Training) else ():
                importlib.import_module(name)
            if request["environment"]["WORLD_SIZE"] != "1":  # what their plans import when they are built
                importlib.import_module("torch.distributed.fsdp")
        gc.freeze()
        pid = 0
        try:
            if (pid := os.fork()) == 0:
                requests.close()
                _become_rank(worker.main, request, descriptors)
        except OSError:  # no more processes, or no memory: the launcher starts it anew
            pid = 0
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(json.dumps({"pid": pid}).encode())


def _report_exits(requests: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            requests.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become_rank(main: Any, request: dict[str, Any], descriptors: list[int]) -> None:
    """Set up the forked process as a newly started one, and run; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.sched_setaffinity(0, request["cores"])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        code = main(request["file"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
