"""Chrome trace JSON, for Perfetto (ui.perfetto.dev) or chrome://tracing: predicted and measured steps in one format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.report.files import write_atomic


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One interval on one lane. Times in seconds from a common start."""

    name: str
    start_s: float
    duration_s: float
    lane: str
    """Thread or stream: "compute", "communication", "copy" …"""
    process: str
    """The process of the lanes: "predicted rank 0", "measured rank 1" …"""
    args: dict[str, Any] = field(default_factory=dict)
    """Shown when the interval is clicked: FLOPs, bytes, phase …"""
    category: str = ""
    """Color group, e.g. the phase."""


def trace_json(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """The trace as plain data: one "X" (complete) event per interval, in microseconds, and names for the lanes."""
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    out: list[dict[str, Any]] = []
    for e in events:
        pid = processes.setdefault(e.process, len(processes) + 1)
        tid = lanes.setdefault((e.process, e.lane), len(lanes) + 1)
        entry = {"name": e.name, "ph": "X", "ts": e.start_s * 1e6, "dur": e.duration_s * 1e6, "pid": pid, "tid": tid}
        if e.category:
            entry["cat"] = e.category
        if e.args:
            entry["args"] = e.args
        out.append(entry)
    out.sort(key=lambda x: x["ts"])
    names = [_meta("process_name", pid, 0, name) for name, pid in processes.items()]
    names += [_meta("thread_name", processes[process], tid, lane) for (process, lane), tid in lanes.items()]
    return {"displayTimeUnit": "ms", "traceEvents": names + out}


def write_trace(path: Path, events: Iterable[TraceEvent]) -> Path:
    """Write a Chrome trace; returns the path. Raises :class:`UserError` when the file cannot be written."""
    return write_atomic(path, json.dumps(trace_json(events), allow_nan=False))


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
