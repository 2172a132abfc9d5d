"""Sweeps of ``ridgeline probe``: collectives and copies of this machine by size, as a study of single operators."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import get_args

from ridgeline import catalog
from ridgeline.jobs.job import LaunchJob, Progress, SweepOptions
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.measure.environment import fingerprint
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.study import Study, StudyCell, StudyTable
from ridgeline.study.operators import Operator, bandwidth, operator_metrics

KINDS = ("collectives", "copies")
SIZES = tuple(1 << p for p in range(10, 27, 2))
QUICK = tuple(1 << p for p in range(10, 23, 4))
"""Bytes: 1 KiB to 64 MiB, or 4 MiB."""
TITLES = {
    "all_reduce": "All-reduce", "all_gather": "All-gather", "reduce_scatter": "Reduce-scatter",
    "host_copy": "Copies through host memory", "device_copy": "Copies within device memory",
    "disk_copy": "Reading from the disk, past the page cache",
}  # fmt: skip


def sweep(
    kinds: Sequence[str], ranks: int = 2, quick: bool = False, progress: Progress | None = None, called: str = ""
) -> Study:
    """Measure ``kinds`` of :data:`KINDS` by size, collectives among 2, 4 … ``ranks`` processes, with the prediction
    from this machine's profile beside, where there is one.

    Raises :class:`UserError` for an unknown kind, for collectives of one rank, and when a measurement fails.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("sweep", kind, KINDS)
    if "collectives" in kinds and ranks < 2:
        raise UserError("collectives need two processes", "give --ranks 2 or more, or --sweep copies")
    start = time.perf_counter()
    options = SweepOptions(sizes=list(QUICK if quick else SIZES))
    cells: list[StudyCell] = []
    counts = [1] if "copies" in kinds else []
    if "collectives" in kinds:
        counts += [n for n in (1 << p for p in range(1, ranks.bit_length())) if n <= ranks]
    for n in counts:
        cells += _measured(options, n, progress)
    tables = [_table(name) for name in get_args(Operator) if any(c.table == name for c in cells)]
    environment = fingerprint()
    text = json.dumps([sorted(kinds), ranks, options.sizes, environment, time.time()], default=str)
    return Study(
        id=hashlib.sha256(text.encode()).hexdigest()[:10], name="sweep", title="Collectives and copies by size",
        tables=tables, cells=sorted(cells, key=lambda c: [t.name for t in tables].index(c.table)),
        environment=environment, created=datetime.now(timezone.utc).isoformat(timespec="seconds"), command=called,
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def _measured(options: SweepOptions, ranks: int, progress: Progress | None) -> list[StudyCell]:
    try:
        found = run_job(LaunchJob("sweep", None, options, ranks=ranks), progress, timeout=1200)
    except JobFailed as failure:
        raise UserError(f"the sweep with {ranks} processes failed: {failure.reason}", failure.log) from None
    return [_cell(name, ranks, int(size), seconds)
            for name, points in found["seconds"].items() for size, seconds in points]  # fmt: skip


def _cell(name: Operator, ranks: int, size: int, seconds: float) -> StudyCell:
    """One operator of one size, measured, with its prediction."""
    axes: dict[str, str | int | float] = {"bytes": size, "ranks": ranks}
    measured = {"operator_s": seconds, "bandwidth_bytes_per_s": bandwidth(name, size, ranks, seconds)}
    cell = StudyCell(table=name, axes=axes, measured=measured, measured_status="ok")
    try:
        cluster = catalog.cluster(f"{ranks}xlocal")
        shared = cluster.model_copy(update={"device": cluster.device.shared_by(ranks)})
        cell.predicted = operator_metrics(name, axes, shared)
    except catalog.NoProfile as error:
        cell.status, cell.reason = "refused", f"{error.what}: {error.fix}"
    return cell


def _table(name: Operator) -> StudyTable:
    copy = name.endswith("_copy")
    note = "bytes read or copied a second" if copy else "bus bandwidth, as NCCL's own tests count it"
    return StudyTable(name=name, title=TITLES[name], rows=["bytes"], columns="" if copy else "ranks",
                      show=["operator_s", "bandwidth_bytes_per_s"], note=note)  # fmt: skip
