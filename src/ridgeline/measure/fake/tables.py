"""Tables of steps that were traced on a fake GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.measure.fake.trace import StepTrace
from ridgeline.report.table import Column, Table
from ridgeline.report.units import percent, seconds

TOP = 12
"""Lines and operators that are listed."""


def fake_trace_tables(steps: Mapping[str, StepTrace], launch_latency: float, predicted: float | None) -> list[Table]:
    """What each step launches and waits for. ``launch_latency``: seconds of a launch, ``predicted``: of a training step
    or of a decode step, on the same device."""
    rows = []
    for name, step in steps.items():
        host = step.launches * launch_latency
        kernels = f"{step.launches} + {step.replayed}" if step.replayed else str(step.launches)
        compared = predicted if name in ("step", "decode") else None
        share = "" if not compared else percent(host / compared)
        rows.append([name, kernels, str(step.waited), str(step.behind) if step.waited else "", seconds(host),
                     "" if compared is None else seconds(compared), share])  # fmt: skip
    columns = [
        Column("step", align="left"),
        *map(Column, ("launches", "waits", "behind", "launching", "predicted", "share")),
    ]
    notes = ["where launching takes longer than the predicted step, the GPU waits for the host",
             "an operator counts as one launch (a few make more), a CUDA graph too; + its kernels",
             "behind: launches that the GPU has left while the host waits; 0: then it waits for the host",
             *dict.fromkeys(label for step in steps.values() for label in step.labels)]  # fmt: skip
    tables = [Table("on a GPU that is not there", columns, rows, notes)]
    for name, step in steps.items():
        if step.wrong:
            tables.append(
                Table(f"{name}: what fails on a GPU", [Column("operator", align="left")], [[w] for w in step.wrong])
            )
        waits = [[w.kind, w.place, str(w.count)] for w in step.waits]
        if waits:
            columns = [Column("for", align="left"), Column("at", align="left"), Column("count")]
            tables.append(Table(f"{name}: what the host waits for", columns, waits))
        if not step.launches:
            continue
        tables.append(_launches(f"{name}: launches by line", "at", step.places))
        tables.append(_launches(f"{name}: launches by operator", "operator", step.operators))
    return tables


def _launches(title: str, what: str, counts: Mapping[str, int]) -> Table:
    """The most frequent of ``counts``, the rest in one row, and their sum."""
    listed = [[key, str(n)] for key, n in list(counts.items())[:TOP]]
    if len(counts) > TOP:
        listed.append([f"({len(counts) - TOP} others)", str(sum(list(counts.values())[TOP:]))])
    listed.append(["total", str(sum(counts.values()))])
    return Table(title, [Column(what, align="left"), Column("count")], listed, total=True)


def fake_trace_json(steps: Mapping[str, StepTrace]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        name: {"launches": s.launches, "replayed": s.replayed, "behind": s.behind, "waits": [vars(w) for w in s.waits],
               "operators": s.operators, "places": s.places, "wrong": s.wrong, "sequences": s.sequences,
               "labels": [*s.labels]}
        for name, s in steps.items()
    }  # fmt: skip
