"""A long-lived pool of gloo processes, so that a distributed test costs a message and not a start of Python.

``world(2).run(function, *args)`` calls ``function(rank, *args)`` on every rank and returns the list of what they
returned. The function must be importable (a module-level one). Ranks meet through a file, so there is no port to
collide, and every pytest process has pools of its own. A rank that raises or hangs costs the pool, which the next use
starts anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
            "torch._dynamo", "torch.distributed.checkpoint.state_dict", "ridgeline.train.trainer",
            "ridgeline.serve.build_engine")  # fmt: skip
HANDED_OVER = ("RIDGELINE_HOME",)
"""Environment variables that tests set and the ranks must see."""


class RankFailed(Exception):
    """A rank raised (``trace`` holds its traceback), died, or did not answer in time."""

    def __init__(self, rank: int, reason: str, trace: str = "") -> None:
        self.rank, self.reason, self.trace = rank, reason, trace
        super().__init__(f"rank {rank}: {reason}\n{trace}")


class World:
    """``ranks`` processes with an initialized gloo group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: str | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank. Raises :class:`RankFailed`; the pool then is gone."""
        if not self._processes:
            self._start()
        environment = {key: os.environ.get(key) for key in HANDED_OVER}
        job = (function.__module__, function.__qualname__, args, environment)
        for pipe in self._pipes:
            pipe.send(job)
        try:
            return self._collect(time.monotonic() + timeout)
        except RankFailed:
            self.close()
            raise

    def _collect(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = [self._pipes[r] for r in range(self.ranks) if r not in answers]
            for pipe in mp.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self._pipes.index(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    raise RankFailed(rank, f"died with exit code {self._processes[rank].exitcode}") from None
                if kind == "raised":
                    raise RankFailed(rank, *value)
                answers[rank] = value
            if time.monotonic() >= deadline and len(answers) < self.ranks:
                raise RankFailed(min(set(range(self.ranks)) - set(answers)), "did not answer in time")
        return [answers[r] for r in range(self.ranks)]

    def _start(self) -> None:
        context = forks()
        self._folder = tempfile.mkdtemp(prefix="world-")
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, self._folder, theirs, sys.path[:]))
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, ranks: int, folder: str, pipe: Any, path: list[str]) -> None:
    gc.freeze()  # what was imported before the fork stays
    gc.enable()  # see tests/uncollected.py
    sys.path[:] = [*path, str(ROOT)]
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
        )
        while True:
            module, name, args, environment = pipe.recv()
            for key, value in environment.items():
                os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
            try:
                pipe.send(("returned", getattr(importlib.import_module(module), name)(rank, *args)))
            except Exception as e:
                pipe.send(("raised", (f"{type(e).__name__}: {e}", traceback.format_exc())))
    os._exit(0)  # peers may be gone: no library destructors


def forks() -> Any:
    """Where processes are forks of one that has imported what takes seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.uncollected", *IMPORTED])
    return context


_WORLDS: dict[int, World] = {}


def world(ranks: int) -> World:
    """This process's pool of that size, made when first used."""
    if ranks not in _WORLDS:
        _WORLDS[ranks] = World(ranks)
        atexit.register(_WORLDS[ranks].close)
    return _WORLDS[ranks]
