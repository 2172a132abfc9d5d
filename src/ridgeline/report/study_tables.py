"""The tables of a study, for the terminal, Markdown, CSV and HTML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.report import units
from ridgeline.report.charts.bandwidth import bandwidth_charts
from ridgeline.report.charts.chart import Chart
from ridgeline.report.charts.study_charts import page_charts
from ridgeline.report.files import write_atomic
from ridgeline.report.page import chart_grid, page, section
from ridgeline.report.table import Column, Table, csv_text, html, markdown
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
    known = [f for f in s.findings if f.verdict != "not known"]
    title = f"Findings: {sum(f.verdict == 'agrees' for f in known)} of {len(known)} agree as predicted"
    rest = len(s.findings) - len(known)
    return Table(f"{title}; {rest} cannot be checked here" if rest else title, columns, rows)


def _bounds(f: StudyFinding) -> str:
    if f.low is not None and f.high is not None:
        return f"{f.low:g} to {f.high:g}"
    return f"≥ {f.low:g}" if f.low is not None else f"≤ {f.high:g}" if f.high is not None else "–"


def _number(x: float | None) -> str:
    return units.NONE if x is None else units.number(x)


def table_pages(s: Study, t: StudyTable) -> Iterator[Table]:
    """One table for each value of the axes that are neither rows nor columns."""
    for where, cells in _cells_by_page(s, t):
        yield _page(t, cells, f"{t.title}{f': {where}' if where else ''}")


def _cells_by_page(s: Study, t: StudyTable) -> Iterator[tuple[str, list[StudyCell]]]:
    """The cells of each page of a table, with the page's name."""
    pages: dict[tuple[Axis, ...], list[StudyCell]] = {}
    for c in (c for c in s.cells if c.table == t.name):
        pages.setdefault(tuple(c.axes[p] for p in t.pages), []).append(c)
    for place, cells in pages.items():
        yield ", ".join(f"{p} {v}" if isinstance(v, (int, float)) or v == "max" else str(v)
                        for p, v in zip(t.pages, place, strict=True)), cells  # fmt: skip


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
    drawn: list[Chart] = []
    sections = [section("Findings", html(findings_table(s)))] if s.findings else []
    measured_sizes = {c.id.removeprefix("bandwidth-"): c for c in bandwidth_charts(s)}
    for t in s.tables:
        tables = list(table_pages(s, t))
        charts = [measured_sizes[t.name]] if t.name in measured_sizes else _charts(s, t)
        drawn += charts
        body = chart_grid(charts) + "".join(html(x) for x in tables)
        several = f"{len(tables)} tables" if len(tables) > 1 else "table"
        folded = f"<details><summary>{len(charts)} charts, {several}</summary>{body}</details>"
        sections.append(section(t.title, folded if len(s.tables) > 3 else body))
    return write_atomic(path, page(s.title or s.name, _facts(s).replace("`", ""), sections, drawn))


def _charts(s: Study, t: StudyTable) -> list[Chart]:
    return [
        chart
        for i, (where, cells) in enumerate(_cells_by_page(s, t))
        for chart in page_charts(t, cells, where or t.title, f"{t.name}-{i}")
    ]


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
    return [write_atomic(folder / f"{t.name}.csv", csv_text(list(cell_records(s, t)))) for t in s.tables]


def cell_records(s: Study, t: StudyTable) -> Iterator[dict[str, Any]]:
    """The cells of a table: axes, status, and metrics and parts, predicted and (``measured_…``) measured, in SI units;
    None where a cell has none."""
    cells = [c for c in s.cells if c.table == t.name]
    fields = dict.fromkeys(k for c in cells for k in (*c.predicted, *c.parts))
    measured = dict.fromkeys(k for c in cells for k in (*c.measured, *c.measured_parts))
    for c in cells:
        known, found = {**c.predicted, **c.parts}, {**c.measured, **c.measured_parts}
        yield {
            **c.axes, "status": c.status, "reason": c.reason, "techniques": " ".join(c.plan),
            "batch_size": c.batch_size, **{k: known.get(k) for k in fields}, "measured_status": c.measured_status,
            **{f"measured_{k}": found.get(k) for k in measured}, "command": c.command,
        }  # fmt: skip
