"""Start the ranks of one job as local processes, follow their progress, and survive their death. No torch here.

Rank 0 writes one JSON object a line on its standard output: progress, then the result. Everything else it and the other
ranks print goes to a log file. A rank that fails leaves ``error-RANK.json`` beside the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from ridgeline.jobs.job import LaunchJob, Progress
from ridgeline.jobs.live import announced_experiment
from ridgeline.jobs.template import ForkedRank, start_rank
from ridgeline.spec.errors import Incompatible, UserError

Rank = ForkedRank | subprocess.Popen[str]
LOG = "log.txt"
_GRACE = 2.0
"""Seconds for the other ranks to report a failure."""
_WATCHDOG = re.compile(r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(\w+).*?"
                       r"Timeout\(ms\)=(\d+)")  # fmt: skip


class JobFailed(Exception):
    """The ranks did not finish. ``status`` is one of oom, error, timeout, interrupted."""

    def __init__(self, status: str, reason: str, log: str = "") -> None:
        self.status, self.reason, self.log = status, reason, log
        super().__init__(f"{status}: {reason}")


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables, and a fair share of the cores for each rank, unless OMP_NUM_THREADS says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS") or threads,
        "TOKENIZERS_PARALLELISM": "true" if rank == 0 else "false",
        "RIDGELINE_WORKER": "1",
    }


def run_job(job: LaunchJob, progress: Progress | None = None, timeout: float | None = None) -> dict[str, Any]:
    """Run the job's ranks to the end; returns rank 0's result object.

    Raises :class:`UserError` for a user's mistake found by the ranks, :class:`JobFailed` when they crash, run out of
    memory or time, and ``KeyboardInterrupt`` after stopping them.
    """
    with (
        announced_experiment(job.mode, job.experiment, job.ranks) as announce,
        tempfile.TemporaryDirectory(prefix="ridgeline-") as folder,
    ):

        def watch(message: dict[str, Any]) -> None:
            announce(message)
            if progress:
                progress(message)

        file = Path(folder) / "job.json"
        file.write_text(job.to_json(), encoding="utf-8")
        port = free_port()
        rendezvous = {"RIDGELINE_RENDEZVOUS": str(Path(folder) / "rendezvous")}
        ranks: list[Rank] = []
        try:
            with (Path(folder) / LOG).open("w", encoding="utf-8") as sink:
                for rank in range(job.ranks):
                    environment = rank_environment(rank, job.ranks, port) | rendezvous
                    ranks.append(_start(file, job.mode, environment, sink, pipe=rank == 0))
            return _follow(ranks, watch, timeout, Path(folder))
        finally:
            _stop(ranks)


def _start(file: Path, mode: str, environment: dict[str, str], sink: IO[str], pipe: bool) -> Rank:
    try:
        return start_rank(file, mode, environment, sink, pipe)
    except OSError:
        return subprocess.Popen(
            [sys.executable, "-m", "ridgeline.jobs.worker", str(file)], env=environment, text=True,
            stdout=subprocess.PIPE if pipe else sink, stderr=sink,
            start_new_session=True,  # Ctrl-C reaches us first; we pass it on once
        )  # fmt: skip


def _follow(ranks: list[Rank], progress: Progress, timeout: float | None, folder: Path) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    broken: list[BaseException] = []  # raised by the caller's own callback

    def read() -> None:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            with contextlib.suppress(json.JSONDecodeError):
                message = json.loads(line)
                messages.append(message)
                if not broken and "result" not in message and "error" not in message:
                    try:
                        progress(message)
                    except BaseException as e:
                        broken.append(e)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    start = time.monotonic()
    interrupted = False
    first: tuple[int, int] | None = None  # the rank that failed first, and its exit code
    stuck: list[int] = []
    while True:
        try:
            time.sleep(0.02)
            first = first or _failed(ranks)
            if broken or first or all(r.poll() is not None for r in ranks):
                break
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True  # let the ranks finish their step and save; a second Ctrl-C does not wait for them
            for r in ranks:
                with contextlib.suppress(ProcessLookupError):
                    r.send_signal(signal.SIGINT)
        if timeout is not None and time.monotonic() - start > timeout:
            _stop(ranks)
            raise JobFailed("timeout", f"did not finish within {timeout:.0f} s", _tail(folder))
    if broken:
        _stop(ranks)
        raise broken[0]
    first = first or _failed(ranks)
    if first:
        stuck = _grace(ranks)
        _stop(ranks)
    reader.join(timeout=5)
    final = messages[-1] if messages else {}
    if "result" in final:
        result: dict[str, Any] = final["result"]
        if interrupted and "stopped" not in result:  # interrupted training has saved, and reports it itself
            raise KeyboardInterrupt
        return result
    if interrupted:
        raise KeyboardInterrupt
    step = max((m["step"] for m in messages if "step" in m), default=0)
    raise _failure(first or (0, 0), _first_error(folder), stuck, step, folder)


def _failure(
    first: tuple[int, int], error: dict[str, Any] | None, stuck: list[int], step: int, folder: Path
) -> Exception:
    """The one message of a failed job: who was killed, else the first error of one that did not just lose a peer."""
    rank, code = first
    after = f" after step {step}" if step else " before the first step"
    log = _tail(folder)
    hung = watchdog(log)
    if hung:
        return JobFailed("timeout", hung, log)
    if code == -signal.SIGKILL:  # its peers' errors about the lost connection are not the cause
        return JobFailed("oom", f"rank {rank} was killed (signal 9){after}: most likely out of memory", log)
    if code < 0:
        return JobFailed("error", f"rank {rank} was ended by signal {-code} ({_signal(-code)}){after}", log)
    if error:
        failure = error_of(error)
        if isinstance(failure, JobFailed) and error["kind"] == "timeout" and stuck:
            names = " and ".join(f"rank {r}" for r in stuck)
            return JobFailed("timeout", f"{failure.reason}; {names} did not answer", failure.log)
        return failure
    return JobFailed("error", f"rank {rank} ended with exit code {code}{after}: {_last_line(folder)}", log)


def error_of(error: dict[str, Any]) -> Exception:
    """The exception for the caller, from the rank's own description (:func:`ridgeline.jobs.failure.describe`)."""
    if error["kind"] == "user":
        return (Incompatible if error["incompatible"] else UserError)(error["what"], error["fix"])
    status = "error" if error["kind"] == "lost" else error["kind"]
    return JobFailed(status, error["what"], error["trace"])


def watchdog(log: str) -> str:
    """The message of NCCL's watchdog before it aborted its process; empty if there is none."""
    found = _WATCHDOG.search(log)
    if not found:
        return ""
    return f"rank {found[1]} waited in vain in {found[2].lower()} for {int(found[3]) / 1e3:.0f} s"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _grace(ranks: list[Rank]) -> list[int]:
    """Wait briefly for the ranks to exit by themselves; returns those that did not."""
    end = time.monotonic() + _GRACE
    while time.monotonic() < end and any(r.poll() is None for r in ranks):
        time.sleep(0.02)
    return [i for i, r in enumerate(ranks) if r.poll() is None]


def _failed(ranks: list[Rank]) -> tuple[int, int] | None:
    """A rank that has failed and its exit code; one that a signal ended before one that noticed."""
    dead = [(i, code) for i, r in enumerate(ranks) if (code := r.poll())]
    return min(dead, key=lambda d: (d[1] >= 0, d[0]), default=None)


def _first_error(folder: Path) -> dict[str, Any] | None:
    """The error of the rank that failed first, unless it failed because of another: timeouts and lost peers are
    consequences."""
    errors: list[dict[str, Any]] = [
        json.loads(f.read_text(encoding="utf-8")) for f in folder.glob("error-*.json")
    ]  # fmt: skip
    rest = {"timeout": 1, "lost": 2}
    return min(errors, key=lambda e: (rest.get(e["kind"], 0), e["time"]), default=None)


def _stop(ranks: list[Rank]) -> None:
    """Kill the ranks that run: at SIGTERM, training would wait for its step, and for peers that are gone."""
    for r in ranks:
        if r.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                r.kill()
    for r in ranks:
        r.wait()


def _tail(folder: Path, lines: int = 40) -> str:
    with contextlib.suppress(OSError):
        return "\n".join((folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    return ""


def _last_line(folder: Path) -> str:
    text = [line for line in _tail(folder).splitlines() if line.strip()]
    return text[-1].strip() if text else "it left no message"
