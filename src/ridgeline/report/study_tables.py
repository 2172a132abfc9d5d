"""The tables of a study, for the terminal, Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ridgeline.report import units
from ridgeline.report.charts.bandwidth import bandwidth_charts
from ridgeline.report.files import write_atomic
from ridgeline.report.page import chart_grid, page, section
from ridgeline.report.table import Column, Table, html, markdown
from ridgeline.spec.study import Axis, Study, StudyCell, StudyFinding, StudyTable

HEADS = {"tokens_per_s": "tokens/s", "peak_bytes": "peak", "step_time_s": "step", "scaling_efficiency": "efficiency",
         "over_reported": "predicted over reported", "operator_s": "time",
         "bandwidth_bytes_per_s": "bandwidth"}  # fmt: skip
RATES = {"flops_per_s": "FLOP/s", "bandwidth_bytes_per_s": "B/s"}
NOTES = 12
"""Largest number of reasons below a table."""
SIGNS = {"agrees": "✓", "disagrees": "✗", "not known": "–"}


def study_tables(s: Study) -> list[Table]:
    """The findings, then every page of every table."""
    return [*([findings_table(s)] if s.findings else []), *(t for spec in s.tables for t in table_pages(s, spec))]


def findings_table(s: Study) -> Table:
    """The source's findings, the values here, and whether they agree."""
    measured = any(f.measured is not None for f in s.findings)
    columns = [Column("finding", align="left"), Column("reported", align="left"), Column("agrees if", align="left"),
               Column("predicted"), Column("")]  # fmt: skip
    columns += [Column("measured"), Column("")] if measured else []
    columns.append(Column("why", align="left"))
    rows = []
    for f in s.findings:
        row = [f.says, f.reported, _bounds(f), _number(f.predicted), SIGNS[f.verdict]]
        row += [_number(f.measured), SIGNS[f.measured_verdict]] if measured else []
        rows.append([*row, f.note])
    agree = sum(f.verdict == "agrees" for f in s.findings)
    return Table(f"Findings: {agree} of {len(s.findings)} agree as predicted", columns, rows)


def _bounds(f: StudyFinding) -> str:
    if f.low is not None and f.high is not None:
        return f"{f.low:g} to {f.high:g}"
    return f"≥ {f.low:g}" if f.low is not None else f"≤ {f.high:g}" if f.high is not None else "–"


def _number(x: float | None) -> str:
    return units.NONE if x is None else units.number(x)


def table_pages(s: Study, t: StudyTable) -> Iterator[Table]:
    """One table for each value of the axes that are neither rows nor columns."""
    cells = [c for c in s.cells if c.table == t.name]
    places = dict.fromkeys(tuple(c.axes[p] for p in t.pages) for c in cells)
    for place in places:
        mine = [c for c in cells if tuple(c.axes[p] for p in t.pages) == place]
        where = ", ".join(f"{p} {v}" if isinstance(v, (int, float)) or v == "max" else str(v)
                          for p, v in zip(t.pages, place, strict=True))  # fmt: skip
        yield _page(t, mine, f"{t.title}{f': {where}' if where else ''}")


def _page(t: StudyTable, cells: list[StudyCell], title: str) -> Table:
    lines = dict.fromkeys(tuple(c.axes[r] for r in t.rows) for c in cells)
    across: list[Axis] = list(dict.fromkeys(c.axes[t.columns] for c in cells)) if t.columns else [""]
    shown = _part_names(cells) if t.parts else t.show
    columns = [Column(r, align="left") for r in t.rows]
    unit = " ranks" if t.columns == "ranks" else ""
    columns += [Column(f"{a}{unit} {_head(m)}".strip()) for a in across for m in shown]
    compared = t.claims and t.rows != ["system"]
    if compared:
        columns.append(Column(f"{_head(shown[0])}, × the first row"))
    if t.claims:
        columns.append(Column("the paper's claim", align="left"))
    rows: list[list[str]] = []
    notes: dict[str, None] = {}
    for line in lines:
        row = [str(v) for v in line]
        for a in across:
            cell = next((c for c in cells if _at(c, t, line, a)), None)
            row += [_text(cell, m, t) for m in shown]
            if cell is not None and cell.status != "ok" and cell.reason:
                notes[f"{' '.join([*row[: len(t.rows)], str(a)]).strip()}: {cell.reason}"] = None
        if t.claims:
            cell = next(c for c in cells if _at(c, t, line, across[0]))
            row += [*([_ratio(cells[0], cell, shown[0])] if compared else []), cell.claim or units.NONE]
        rows.append(row)
    more = [f"and {len(notes) - NOTES} more, in the CSV files"] if len(notes) > NOTES else []
    return Table(title, columns, rows, notes=[*([t.note] if t.note else []), *list(notes)[:NOTES], *more])


def _at(c: StudyCell, t: StudyTable, line: tuple[Axis, ...], across: Axis) -> bool:
    return tuple(c.axes[r] for r in t.rows) == line and (not t.columns or c.axes[t.columns] == across)


def _ratio(first: StudyCell, cell: StudyCell, metric: str) -> str:
    base, own = first.predicted.get(metric), cell.predicted.get(metric)
    return units.times(own / base) if base and own else units.NONE


def _part_names(cells: list[StudyCell]) -> list[str]:
    sums: dict[str, float] = {}
    for c in cells:
        for name, seconds in c.parts.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return [name for name, total in sums.items() if total > 0]


def _head(name: str) -> str:
    return HEADS.get(name, name.removesuffix("_s"))


def _text(c: StudyCell | None, name: str, t: StudyTable) -> str:
    """A cell's value; beside the prediction what was measured; ``does not fit``, ``refused``."""
    if c is None:
        return units.NONE
    part = bool(t.parts)
    if c.status == "refused":
        return "refused"
    predicted = (c.parts if part else c.predicted).get(name)
    measured = (c.measured_parts if part else c.measured).get(name)
    text = _value(predicted, name, part)
    if c.status == "infeasible" and name != "peak_bytes" and not t.beyond_memory:
        text = "does not fit"
    if not c.measured_status:
        return text
    return f"{text} | {_value(measured, name, part) if measured is not None else c.measured_status}"


def _value(value: float | None, name: str, part: bool) -> str:
    if name in RATES:
        return units.NONE if value is None else units.count(value, RATES[name])
    return units.metric(value, "s" if part else _unit(name))


def _unit(metric: str) -> str:
    if metric in RATES:
        return RATES[metric]
    if metric.endswith("_bytes"):
        return "bytes"
    if metric.endswith("_per_s"):
        return f"{metric.removesuffix('_per_s')}/s"
    return "s" if metric.endswith("_s") else ""


def study_markdown(s: Study) -> str:
    """The whole study as Markdown."""
    return f"# {s.title or s.name}\n\n{_facts(s)}\n\n{markdown(study_tables(s))}"


def study_html(s: Study, path: Path) -> Path:
    """The whole study as one HTML file that needs no network."""
    charts = bandwidth_charts(s)
    sections = [chart_grid(charts)] if charts else []
    for title, tables in groupby(study_tables(s), lambda t: t.title.partition(":")[0]):
        group = list(tables)
        body = "".join(html(t) for t in group)
        sections.append(section(title, body if len(sections) == 0 else f"<details><summary>{len(group)} tables"
                                f"</summary>{body}</details>"))  # fmt: skip
    return write_atomic(path, page(s.title or s.name, _facts(s).replace("`", ""), sections, charts))


def _facts(s: Study) -> str:
    source = f"After {s.source}. " if s.source else ""
    ok = sum(c.status == "ok" for c in s.cells)
    measured = sum(c.measured_status == "ok" for c in s.cells)
    told = f", {measured} measured" if measured else ""
    return (
        f"{source}{len(s.cells)} cells, {ok} feasible{told}, in {s.seconds:.1f} s. `{s.command}` on {s.created[:10]},"
        f" {s.environment.get('cpu', '')}, code {s.environment.get('code', '')}."
    )


def study_csv(s: Study, folder: Path) -> list[Path]:
    """One file per table: a line per cell, metrics in SI units."""
    files = []
    for t in s.tables:
        cells = [c for c in s.cells if c.table == t.name]
        axes = list(dict.fromkeys(a for c in cells for a in c.axes))
        fields = list(dict.fromkeys(k for c in cells for k in (*c.predicted, *c.parts)))
        measured = list(dict.fromkeys(k for c in cells for k in (*c.measured, *c.measured_parts)))
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*axes, "status", "reason", "plan", "batch_size", *fields, "measured_status",
                         *(f"measured_{k}" for k in measured), "command"])  # fmt: skip
        for c in cells:
            known, found = {**c.predicted, **c.parts}, {**c.measured, **c.measured_parts}
            writer.writerow([*(c.axes[a] for a in axes), c.status, c.reason, " ".join(c.plan), c.batch_size,
                             *(known.get(k) for k in fields), c.measured_status,
                             *(found.get(k) for k in measured), c.command])  # fmt: skip
        files.append(write_atomic(folder / f"{t.name}.csv", out.getvalue()))
    return files
