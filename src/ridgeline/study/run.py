"""Run a study: predict every cell in parallel, measure those that can run here, and check the findings."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from ridgeline import catalog
from ridgeline.jobs.job import DissectOptions, LaunchJob
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.jobs.live import announced
from ridgeline.measure.ablate import cell_key, measure_plan, require_local, usable
from ridgeline.measure.bench import USED, merge_generation, with_device_use
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.merge import merge
from ridgeline.predict import predict
from ridgeline.report.definitions import define
from ridgeline.report.dissection import parts_of
from ridgeline.report.files import write_atomic
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.study import Axis, Study, StudyCell, StudyFinding, StudyTable, Verdict
from ridgeline.study.cells import StudyScale, command, experiment_of
from ridgeline.study.file import FindingFile, StudyFile, TableFile, places, require_one, stands_at
from ridgeline.study.operators import operator_metrics
from ridgeline.techniques.registry import brief, registry
from ridgeline.validate.systems import reproduce

Done = Callable[[str], None]
_OWN = ("fits", "scaling_efficiency", "over_reported")
"""Metrics that are made of several cells, or of a reported one."""
TIMEOUT = 600.0
"""Seconds of one measured cell."""


class PlannedCell(NamedTuple):
    """One cell before it is run."""

    table: TableFile
    axes: dict[str, Axis]


def run_study(
    study: StudyFile, folder: Path, workers: int = 2, scale: StudyScale | None = None, done: Done | None = None,
    called: str = "",
) -> Study:  # fmt: skip
    """Predict all cells; with a ``scale`` predict and measure them on this machine at that scale instead. Cells that
    were measured before are taken from ``folder``. A cell that is refused is a result with its reason."""
    start, identity = time.perf_counter(), key(study, scale)
    if scale is not None:
        study = scale.study(study)
    todo = [PlannedCell(table, axes) for table in study.tables for axes in study.cells(table)]
    cells = _predicted(study, todo, workers, scale, done)
    _require_metrics(study, cells)
    if scale is not None:
        _measure(study, todo, cells, scale, folder, done)
    _add_efficiency(cells)
    return Study(
        id=identity, name=study.name, title=study.title, source=study.source,
        tables=[_layout(t) for t in study.tables], cells=cells,
        findings=[check(f, cells, scale) for f in study.findings], environment=fingerprint(), command=called,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"), seconds=time.perf_counter() - start,
    )  # fmt: skip


def key(study: StudyFile, scale: StudyScale | None) -> str:
    """A hash of the file's content and the scale."""
    return hashlib.sha256(f"{study.model_dump_json()}{scale}".encode()).hexdigest()[:10]


def count(study: StudyFile) -> int:
    """Number of cells."""
    return sum(1 for table in study.tables for _ in study.cells(table))


def _layout(t: TableFile) -> StudyTable:
    return StudyTable(
        name=t.name, title=t.title or t.name, rows=t.rows, columns=t.columns, pages=t.pages, show=t.show, parts=t.parts,
        cdf=t.cdf, beyond_memory=t.beyond_memory, claims=t.claims, note=t.note,
    )  # fmt: skip


def _require_metrics(study: StudyFile, cells: list[StudyCell]) -> None:
    """Raise :class:`UserError` for a metric that does not exist: one without a definition, which no cell has."""
    for t in study.tables:
        found = {name for c in cells if c.table == t.name for name in c.predicted}
        asked = [] if t.parts or not found else list(t.show)
        asked += [f.metric for f in study.findings if any(p["table"] == t.name for p in places(f.of) + places(f.over))]
        for name in asked:
            exists = name in found or name in _OWN or name.startswith("parts:")
            if not exists and not define(re.sub(r"_(p\d+|mean)_", "_", name)):
                raise unknown("metric", name, found, f"the study's table {t.name!r}")


def _add_efficiency(cells: list[StudyCell]) -> None:
    """Throughput per device over that of one device, for cells that differ in their number of devices."""
    alone = {_but_devices(c): c for c in cells if c.axes.get("devices") == 1}
    for c in cells:
        one = alone.get(_but_devices(c)) if "devices" in c.axes else None
        for values, base in ((c.predicted, one and one.predicted), (c.measured, one and one.measured)):
            if base and "tokens_per_s" in base and "tokens_per_s" in values:
                values["scaling_efficiency"] = values["tokens_per_s"] / base["tokens_per_s"] / int(c.axes["devices"])


def _but_devices(c: StudyCell) -> tuple[object, ...]:
    return c.table, *((k, v) for k, v in c.axes.items() if k != "devices")


# ---- predicted ------------------------------------------------------------------------------------------------------


def _predicted(
    study: StudyFile, todo: list[PlannedCell], workers: int, scale: StudyScale | None, done: Done | None
) -> list[StudyCell]:
    run = partial(predicted_cell, study, scale=scale)
    cells: list[StudyCell] = []

    def take(found: Iterable[StudyCell]) -> None:
        for cell in found:
            cells.append(cell)
            if done:
                done(_label(todo[len(cells) - 1]))

    if workers > 1:
        with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, get_context("fork")) as pool:
            take(pool.map(run, todo, chunksize=4))
    take(map(run, todo[len(cells) :]))  # also what a worker that was killed has left
    return cells


def predicted_cell(study: StudyFile, place: PlannedCell, scale: StudyScale | None = None) -> StudyCell:
    """The prediction of one cell, or the reason why there is none."""
    cell = StudyCell(table=place.table.name, axes=place.axes, claim=_claim(place) if place.table.claims else "")
    if place.table.operator is not None:
        return _operator_cell(study, place, cell, scale)
    try:
        e = experiment_of(study, place.table, place.axes, scale)
        r = with_device_use(predict(e)) if USED in place.table.show else predict(e)
        ratio = reproduce(catalog.system(str(place.axes["system"]))).ratio if "system" in place.axes else None
    except UserError as error:
        return cell.model_copy(update={"status": "refused", "reason": error.what})
    values = _values(r) if ratio is None else {**_values(r), "over_reported": ratio}
    return cell.model_copy(update={
        "plan": brief(e.plan), "batch_size": e.batch_size if e.is_training else None, "status": r.status,
        "reason": r.reason, "predicted": values, "command": command(e),
        "parts": parts_of(r, place.table.parts) if place.table.parts else {},
        "latencies": r.distributions.get(f"{place.table.cdf}_s", []),
    })  # fmt: skip


def _claim(place: PlannedCell) -> str:
    if "system" in place.axes:
        s = catalog.system(str(place.axes["system"]))
        return f"{s.claim} ({s.paper})"
    technique = registry().get(str(place.axes.get("plan", "")))
    return f"{technique.card.claim} ({technique.card.paper})" if technique and technique.card.claim else ""


def _operator_cell(study: StudyFile, place: PlannedCell, cell: StudyCell, scale: StudyScale | None) -> StudyCell:
    assert place.table.operator is not None
    if scale is not None:
        return cell.model_copy(update={"status": "refused", "reason": "operators are measured by `ridgeline probe`"})
    platform = str(place.axes["platform"])
    cluster = catalog.cluster(study.platforms.get(platform, platform))
    try:
        return cell.model_copy(update={"predicted": operator_metrics(place.table.operator, place.axes, cluster)})
    except UserError as error:
        return cell.model_copy(update={"status": "refused", "reason": error.what})


def _values(r: Result) -> dict[str, float]:
    found = {name: m.value for name, m in r.metrics.items() if math.isfinite(m.value)}
    return found if r.peak_bytes is None else {"peak_bytes": r.peak_bytes, **found}


def _label(place: PlannedCell) -> str:
    return f"{place.table.name}: {' '.join(str(v) for v in place.axes.values())}"


# ---- measured -------------------------------------------------------------------------------------------------------


def _measure(
    study: StudyFile,
    todo: list[PlannedCell],
    cells: list[StudyCell],
    scale: StudyScale,
    folder: Path,
    done: Done | None,
) -> None:
    """Measure each different experiment once, and fill in every cell that stands for it."""
    measured_now: set[Path] = set()
    with announced("study", study.name, steps=len(todo)) as tell:
        for i, (place, cell) in enumerate(zip(todo, cells, strict=True)):
            tell({"step": i, "stage": _label(place)})
            if cell.status == "refused":
                cell.measured_status, cell.measured_reason = "refused", cell.reason
            else:
                _measure_cell(place, cell, experiment_of(study, place.table, place.axes, scale), folder, measured_now)
            if done:
                done(f"measured {_label(place)}: {cell.measured_status}")


def _measure_cell(place: PlannedCell, cell: StudyCell, e: Experiment, folder: Path, measured_now: set[Path]) -> None:
    """Take the measurement of the same code from ``folder``, or measure; what failed is tried once in a run."""
    try:
        require_local(e)
    except UserError as error:
        cell.measured_status, cell.measured_reason = "refused", error.what
        return
    profiled = bool(place.table.parts) and e.task != "compress"
    file = folder / "cells" / f"{cell_key(e)}{'-dissected' if profiled else ''}.json"
    if file in measured_now or usable(file):
        r = Result.load(file)
    else:
        r = dissected(e) if profiled else measured(e)
        write_atomic(file, r.to_json())
        measured_now.add(file)
    cell.measured_status, cell.measured_reason = r.status, r.reason
    if r.status == "ok":
        cell.measured = _values(r)
        cell.measured_parts = parts_of(r, place.table.parts) if place.table.parts else {}
        cell.measured_latencies = r.distributions.get(f"{place.table.cdf}_s", [])


def measured(e: Experiment) -> Result:
    """One measurement of an experiment, in processes of its own."""
    part = measure_plan(e, timeout=TIMEOUT)
    if part.status != "ok":
        return part
    return merge([part]) if e.is_training else merge_generation([part]) if e.task == "generate" else part


def dissected(e: Experiment) -> Result:
    """One measurement of an experiment's steps under the profiler, with their breakdown."""
    job = LaunchJob("dissect", e, DissectOptions(), ranks=e.world)
    try:
        return Result.model_validate(run_job(job, timeout=TIMEOUT))
    except JobFailed as failure:
        part = measured(e)
        return part.model_copy(update={"notes": [*part.notes, f"not dissected: {failure.reason}"]})


# ---- findings -------------------------------------------------------------------------------------------------------


def check(f: FindingFile, cells: list[StudyCell], scale: StudyScale | None = None) -> StudyFinding:
    """A finding's value, predicted and measured, and whether it agrees; not known where a ``scale`` has made the same
    experiment of what it compares."""
    lost = scale is not None and not _survives(f, scale)
    if scale is not None and not lost:
        at = {side: [scale.place(p) for p in places(getattr(f, side))] for side in ("of", "over")}
        f = f.model_copy(update=at)
    used = [] if lost else [_cell(place, cells, f.says) for place in (*places(f.of), *places(f.over))]
    values = [None if lost else _value(f, cells, measured) for measured in (False, True)]
    verdicts = [_verdict(f, v) for v in values]
    beyond = [c for c in used if c.status == "infeasible" and f.metric not in ("fits", "peak_bytes")]
    notes = ["it is about the paper's own machines and models"] if lost else [f.note]
    notes += ["predicted as if memory sufficed, which it does not"] if beyond and not lost else []
    return StudyFinding(says=f.says, reported=f.reported, predicted=values[0], measured=values[1], low=f.low,
                        high=f.high, verdict=verdicts[0], measured_verdict=verdicts[1],
                        note="; ".join(n for n in notes if n))  # fmt: skip


def _survives(f: FindingFile, scale: StudyScale) -> bool:
    """Whether a finding still compares different experiments at a scale: not machines, models or engines."""
    gone = ("model", "platform", "engine")
    sides = [[{k: v for k, v in p.items() if k not in gone} for p in places(side)] for side in (f.of, f.over)]
    devices = [int(p.get("devices", 1)) for side in sides for p in side]
    return bool(sides[1]) and max(devices) <= scale.devices and all(p not in sides[1] for p in sides[0])


def _value(f: FindingFile, cells: list[StudyCell], measured: bool) -> float | None:
    value = f.factor
    for power, listed in ((1, f.of), (-1, f.over)):
        for place in places(listed):
            found = _metric(f.metric, _cell(place, cells, f.says), measured)
            if found is None or found <= 0:
                return None
            value *= found**power
    return value


def _metric(name: str, cell: StudyCell, measured: bool) -> float | None:
    if name.startswith("parts:"):
        parts = cell.measured_parts if measured else cell.parts
        return sum(v for k, v in parts.items() if k.startswith(name[6:])) or None
    if name == "fits":
        status = cell.measured_status if measured else cell.status
        return None if not status else 2.0 if status == "ok" else 1.0
    return (cell.measured if measured else cell.predicted).get(name)


def _cell(place: dict[str, Axis], cells: list[StudyCell], says: str) -> StudyCell:
    found = [c for c in cells if c.table == place["table"] and stands_at(c.axes, place)]
    require_one(says, place, found)
    return found[0]


def _verdict(f: FindingFile, value: float | None) -> Verdict:
    if value is None:
        return "not known"
    inside = (f.low is None or value >= f.low) and (f.high is None or value <= f.high)
    return "agrees" if inside else "disagrees"
