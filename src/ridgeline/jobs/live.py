"""Jobs that run now, for who looks from another process: one small file per job, gone when the job is. No torch here.

A file is replaced as a whole, at most twice a second; one whose process has died is dropped by whoever reads next. A
directory that cannot be written costs the job nothing but being seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ridgeline.paths import data_dir
from ridgeline.spec.experiment import Experiment

EVERY = 0.5
"""Seconds between two versions of a job's file."""
KEPT = 400
"""Points of the loss curve that a file holds; of longer ones every second, fourth, … step."""


@dataclass
class LiveJob:
    """A job under way."""

    id: str
    kind: str
    """The mode of :data:`ridgeline.jobs.job.MODES`, or ``ablation`` and such for many jobs in a row."""
    title: str
    plan: str
    ranks: int
    pid: int
    born: float
    """When the process ``pid`` started, seconds since the epoch: a number may be given to another process."""
    started: float
    """Seconds since the epoch."""
    folder: str = ""
    """The working directory."""
    stage: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    first: int | None = None
    """The step that it began with: not 0 when it resumes."""

    def take(self, message: dict[str, Any]) -> None:
        """Note what a message of rank 0 says."""
        self.stage = str(message.get("stage", "" if "step" in message else self.stage))
        self.step, self.steps = message.get("step", self.step), message.get("steps", self.steps)
        if self.first is None and "step" in message:
            self.first = self.step
        if message.get("tokens") and message.get("seconds"):
            self.tokens_per_s = message["tokens"] / message["seconds"]
        if message.get("loss") is not None:
            self.loss = float(message["loss"])
            self.losses.append((self.step, self.loss))
            if len(self.losses) > KEPT:
                self.losses = self.losses[::2]

    def memory(self) -> int:
        """Resident bytes of the job's processes together; 0 when they are gone."""
        try:
            own = psutil.Process(self.pid)
            return sum(_resident(p) for p in (own, *own.children(recursive=True)))
        except psutil.Error:
            return 0


def _resident(p: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(p.memory_info().rss)
    return 0


def live_dir() -> Path:
    """Where the files are."""
    return data_dir() / "live"


@contextmanager
def announced(kind: str, title: str, plan: str = "", ranks: int = 1, steps: int = 0) -> Iterator[Callable[..., None]]:
    """Others see a job of this process for as long as this is open; takes its messages."""
    own = psutil.Process()
    job = LiveJob(uuid.uuid4().hex[:12], kind, title, plan, ranks, own.pid, own.create_time(), time.time(),
                  os.getcwd(), steps=steps)  # fmt: skip
    file = live_dir() / f"{job.id}.json"
    written = 0.0

    def message(m: dict[str, Any]) -> None:
        nonlocal written
        job.take(m)
        if time.monotonic() - written >= EVERY:
            written = time.monotonic()
            _write(file, job)

    _write(file, job)
    try:
        yield message
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def announced_experiment(kind: str, e: Experiment | None, ranks: int) -> contextlib.AbstractContextManager[Any]:
    """:func:`announced` with the title of an experiment and the names of its techniques."""
    if e is None:
        return announced(kind, kind, ranks=ranks)
    plan = " ".join(call.name for call in e.plan.calls)
    return announced(kind, e.name or e.model.name, plan, ranks, getattr(e.workload, "steps", 0))


def _write(file: Path, job: LiveJob) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(job)), encoding="utf-8")
        draft.replace(file)


def running() -> list[LiveJob]:
    """Jobs under way, oldest first; files of dead processes are removed."""
    found = []
    for file in live_dir().glob("*.json"):
        try:
            job = LiveJob(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # it has just ended, or another version wrote it
        if _alive(job):
            found.append(job)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda j: j.started)


def _alive(job: LiveJob) -> bool:
    try:
        return bool(abs(psutil.Process(job.pid).create_time() - job.born) < 1)
    except psutil.Error:
        return False
