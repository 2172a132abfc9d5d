"""Running jobs, as a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from ridgeline.jobs.live import LiveJob
from ridgeline.report import units
from ridgeline.report.table import Column, Table

BARS = "▁▂▃▄▅▆▇█"
CURVE = 24
"""Characters of a loss curve."""


def live_table(jobs: Sequence[LiveJob], now: float | None = None) -> Table:
    """A line per job: progress, remaining time, loss, throughput, memory. ``now``: seconds since the
    epoch."""
    now = time.time() if now is None else now
    words = ("job", "name", "plan")
    columns = [
        *(Column(w, align="left") for w in words), Column("ranks"), Column("step"), Column("stage", align="left"),
        Column("running"), Column("left"), Column("loss"), Column("loss curve", align="left"), Column("throughput"),
        Column("memory"),
    ]  # fmt: skip
    rows = [_row(job, max(0.0, now - job.started)) for job in jobs]
    if not rows:
        return Table("no job is running", columns, [])
    return Table("running jobs", columns, rows).without_empty_columns()


def _row(job: LiveJob, passed: float) -> list[str]:
    here = job.step - (job.first or 0)
    left = passed / here * (job.steps - job.step) if here > 0 and job.steps else None
    done = f"{job.step}/{job.steps}" if job.steps else str(job.step or "")
    loss = units.NONE if job.loss is None else f"{job.loss:.4f}"
    rate, memory = units.metric(job.tokens_per_s, "tokens/s"), units.size(job.memory() or None)
    return [
        job.kind, job.title, job.plan or units.NONE, str(job.ranks), done, job.stage, _clock(passed), _clock(left),
        loss, curve([y for _, y in job.losses]), rate, memory,
    ]  # fmt: skip


def curve(values: Sequence[float]) -> str:
    """A line of block characters between the lowest and the highest of ``values``, the mean of neighbors each."""
    if len(values) < 2:
        return ""
    width = min(CURVE, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((m - low) / span * len(BARS)))] for m in means)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return units.NONE
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
