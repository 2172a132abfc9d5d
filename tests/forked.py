"""Processes that are forks of one which has imported PyTorch: to start Python anew takes most of a small test's time.
How processes are really started is for tests that do not come here."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.world import ROOT, forks

from ridgeline.serve import remote_engine
from ridgeline.serve.remote_engine import RemoteEngine


class Fork:
    """``function(send, *arguments)`` in a process of its own; :attr:`said` receives what it sends. The function must be
    importable."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.said, theirs = forks().Pipe(duplex=False)
        handle, self.log = tempfile.mkstemp(prefix="fork-")
        """What it writes to standard error."""
        os.close(handle)
        weakref.finalize(self, os.unlink, self.log)
        here = (dict(os.environ), os.getcwd(), sys.path[:], self.log)
        call = (function.__module__, function.__qualname__, arguments)
        self.process = forks().Process(target=_run, args=(theirs, here, call), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, seconds: float = 300.0) -> Any:
        """What it sends next."""
        assert self.said.poll(seconds), f"a fork is silent: {self.errors()}"
        try:
            return self.said.recv()
        except EOFError:
            raise AssertionError(f"a fork ended: {self.errors()}") from None

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return Path(self.log).read_text(errors="replace")[-4000:]

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def returncode(self) -> int | None:
        """As that of ``subprocess.Popen``, like the next methods."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.process.kill()


def _run(said: Any, here: tuple[dict[str, str], str, list[str], str], call: tuple[str, str, tuple[Any, ...]]) -> None:
    gc.freeze()
    gc.enable()  # see tests/uncollected.py
    environment, folder, path, log = here
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*path, str(ROOT)]
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    module, name, arguments = call
    getattr(importlib.import_module(module), name)(said.send, *arguments)


def command(send: Callable[[Any], None], log: str, *words: str) -> None:
    """``ridgeline WORDS`` in a fork, with what it says in the file ``log``."""
    from ridgeline import cli

    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["ridgeline", *words]
    cli.main()


def engine_apart(build: Callable[..., Any]) -> RemoteEngine:
    """``RemoteEngine(build)`` in a fork, once it is ready."""
    with mock.patch.object(remote_engine, "subprocess", _Subprocess):
        return RemoteEngine(build).wait_ready()


class _Subprocess:
    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: list[str], pass_fds: list[int], **_: Any) -> Fork:
        with socket.socket(fileno=os.dup(pass_fds[0])) as server:
            return Fork(engine, server)


def engine(send: Callable[[Any], None], server: socket.socket) -> None:
    """The engine's process, as its server starts it."""
    from ridgeline.serve.engine_process import main

    sys.argv = ["", str(server.detach())]
    main()
