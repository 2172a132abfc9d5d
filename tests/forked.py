"""Engines in processes of their own that are forks of one which has imported PyTorch: to start Python for each would
take most of a test's time. How a server really starts them is for tests that do not come here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.world import ROOT, forks

from ridgeline.serve import remote_engine
from ridgeline.serve.remote_engine import RemoteEngine


def engine_apart(build: Callable[..., Any]) -> RemoteEngine:
    """``RemoteEngine(build)`` once it is ready."""
    with mock.patch.object(remote_engine, "subprocess", _Subprocess):
        return RemoteEngine(build).wait_ready()


class _Popen:
    """What a :class:`RemoteEngine` and its tests use of ``subprocess.Popen``."""

    def __init__(self, command: list[str], pass_fds: list[int], **_: Any) -> None:
        with socket.socket(fileno=os.dup(pass_fds[0])) as server:
            arguments = (server, dict(os.environ), os.getcwd(), sys.path[:])
            self._process = forks().Process(target=_engine, args=arguments, daemon=True)
            self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()


class _Subprocess:
    Popen, DEVNULL, TimeoutExpired = _Popen, subprocess.DEVNULL, subprocess.TimeoutExpired


def _engine(server: socket.socket, environment: dict[str, str], folder: str, path: list[str]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*path, str(ROOT)]
    import torch

    from ridgeline.serve.engine_process import main

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["", str(server.detach())]
    main()
