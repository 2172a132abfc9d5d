"""A validation as tables, and as a page of measured-against-predicted pictures."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from pathlib import Path

from ridgeline.report.charts.chart import (
    BLUE,
    GRAY,
    GREEN,
    PURPLE,
    RED,
    SPARE,
    YELLOW,
    Chart,
    Figure,
    axis,
    layout,
    plain,
)
from ridgeline.report.files import write_atomic
from ridgeline.report.page import chart_grid, page, section
from ridgeline.report.table import Column, Table
from ridgeline.report.table import html as table_html
from ridgeline.report.units import NONE, metric, percent
from ridgeline.validate.case import Case
from ridgeline.validate.run import FileReport, Report
from ridgeline.validate.score import regret_summary

UNITS = {"seconds": "s", "bytes": "bytes", "ttft_s": "s", "tpot_s": "s", "step_s": "s", "tokens_per_s_per_device":
         "tokens/s", "iteration_time_s": "s"}  # fmt: skip
DRAWN = 1500
"""Maximum points of one picture; larger sets are thinned evenly."""
REASONS = 6


def score_table(report: Report) -> Table:
    """One line per file, group and quantity."""
    columns = [Column("File", align="left"), Column("Group", align="left"), Column("Quantity", align="left"),
               Column("n"), Column("Median"), Column("Mean"), Column("p90"), Column("Bias", "bias"),
               Column("≤ 10 %"), Column("≤ 20 %"), Column("In 95 %", "inside"),
               Column("Trivial", "baseline"), Column("Rank", "rank"), Column("Constants", align="left")]  # fmt: skip
    rows = [
        [s.file, s.group, s.quantity, str(s.n), percent(s.median_ape), percent(s.mean_ape), percent(s.p90_ape),
         percent(s.bias, signed=True), percent(s.within_10), percent(s.within_20), percent(s.inside),
         percent(s.baseline_mean_ape),
         NONE if s.rank_correlation is None else f"{s.rank_correlation:.3f}", s.source]
        for f in report.files for s in f.scores
    ]  # fmt: skip
    notes = [
        "errors are |predicted / measured - 1|; Trivial: mean error of a baseline (one constant, or a roofline of a"
        " few) fitted to these very rows; In 95 %: rows inside the 95 % interval that the prediction states",
        "constants from open data were fitted on rows like these: for held-out figures see the benchmarks' results",
    ]
    return Table("Predictions against measurements", columns, rows, notes)


def worst_table(report: Report) -> Table:
    """The worst rows of each file, with what the prediction says bounds them."""
    columns = [Column("File", align="left"), Column("Line"), Column("Row", align="left"), Column("Measured"),
               Column("Predicted"), Column("Error"), Column("Predicted bound", align="left")]  # fmt: skip
    rows = [
        [f.file, str(c.line), c.label, _fmt(c, c.measured), _fmt(c, c.predicted), percent(c.error, signed=True), c.why]
        for f in report.files
        for c in f.worst
    ]
    return Table("Worst rows", columns, rows)


def regret_table(report: Report) -> Table | None:
    """The cost of following the predictor's choice of plan, per file; None if no file has alternatives."""
    columns = [Column("File", align="left"), Column("Choices"), Column("Best picked"), Column("Median regret"),
               Column("Mean"), Column("p90"), Column("Worst")]  # fmt: skip
    rows = []
    for f in report.files:
        s = regret_summary(f.choices)
        if s:
            rows.append(
                [f.file, str(s["n"]), *(percent(s[k]) for k in ("best_picked", "median", "mean", "p90", "max"))]
            )
    notes = ["among rows that differ only in their plan: the loss of the plan predicted best against the one measured"
             " best"]  # fmt: skip
    return Table("Planner's regret", columns, rows, notes) if rows else None


def skipped_lines(report: Report) -> list[str]:
    """Skipped rows with their reasons; repeated reasons are counted."""
    out = [f"{name}: not judged: {why}" for name, why in report.ignored]
    for f in report.files:
        if not f.skipped:
            continue
        reasons: dict[str, list[int]] = defaultdict(list)
        for s in f.skipped:
            reasons[s.reason].append(s.line)
        out.append(f"{f.file}: {len(f.skipped)} of {f.rows} rows skipped, {f.rows - len(f.skipped)} judged")
        for reason, lines in sorted(reasons.items(), key=lambda kv: -len(kv[1]))[:REASONS]:
            more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
            out.append(f"  line {lines[0]}{more}: {reason}")
        if len(reasons) > REASONS:
            out.append(f"  … {len(reasons) - REASONS} other reasons; --json lists every row")
    return out


def assumed_lines(report: Report) -> list[str]:
    """What was taken for cells that rows leave empty, one line per file."""
    out = []
    for f in report.files:
        taken = []
        for column, values in f.assumed().items():
            usual = [name for name, _ in values.most_common(2)]
            more = ", …" if len(values) > 2 else ""
            taken.append(f"{column} {' or '.join(usual)}{more} (rows: {values.total()})")
        if taken:
            out.append(f"{f.file}: not stated, and taken as: {'; '.join(taken)}")
    return out


def validation_html(report: Report, path: Path) -> Path:
    """Write the page: the tables, and one scatter per file and quantity."""
    charts = [_scatter(f, q) for f in report.files for q in dict.fromkeys(c.quantity for c in f.cases)]
    tables = [t for t in (score_table(report), regret_table(report), worst_table(report)) if t is not None]
    lead = f"{report.judged} measured quantities of {len(report.files)} files predicted; {report.skipped} rows skipped."
    skipped, assumed = (
        "".join(f"<li>{plain(line, 400)}</li>" for line in lines(report)) for lines in (skipped_lines, assumed_lines)
    )
    sections = [section("Error table", "".join(map(table_html, tables)))]
    if skipped:
        sections.append(section("Not judged", f"<ul>{skipped}</ul>"))
    if assumed:
        sections.append(section("Not stated", f"<ul>{assumed}</ul>"))
    return write_atomic(path, page("Validation", lead, [*sections, chart_grid(charts)], charts))


def rows_csv(report: Report, path: Path) -> Path:
    """Write every judged row with its prediction, the 95 % interval and the error; skipped rows with their reason."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["file", "line", "group", "quantity", "measured", "predicted", "low", "high", "error", "source",
                    "bound", "row", "not_stated", "skipped"])  # fmt: skip
    for f in report.files:
        for c in f.cases:
            reach = None if c.spread is None else math.exp(1.96 * c.spread)
            ends = ("", "") if reach is None else (f"{c.predicted / reach:.6g}", f"{c.predicted * reach:.6g}")
            table.writerow([f.file, c.line, c.group, c.quantity, f"{c.measured:.6g}", f"{c.predicted:.6g}", *ends,
                            f"{c.error:.4f}", c.source, c.why, c.label, _pairs(c), ""])  # fmt: skip
        table.writerows([f.file, s.line, *[""] * 11, s.reason] for s in f.skipped)
    return write_atomic(path, out.getvalue())


def _pairs(c: Case) -> str:
    return "; ".join(f"{column}={value}" for column, value in c.assumed)


def _fmt(c: Case, value: float) -> str:
    return metric(value, UNITS.get(c.quantity, ""))


def _scatter(f: FileReport, quantity: str) -> Chart:
    """Measured over predicted on log axes, one color per group, with the line of perfect prediction and ±20 %."""
    cases = [c for c in f.cases if c.quantity == quantity]
    groups: dict[str, list[Case]] = defaultdict(list)
    for c in cases[:: max(1, len(cases) // DRAWN)]:
        groups[c.group].append(c)
    values = [v for c in cases for v in (c.predicted, c.measured)]
    low, high = min(values) / 1.3, max(values) * 1.3
    colors = (BLUE, RED, GREEN, YELLOW, PURPLE, *SPARE)
    lines: list[Figure] = [
        {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low * k, high * k], "hoverinfo": "skip",
         "showlegend": False, "line": {"color": GRAY, "width": 1.4 if k == 1 else 0.8, "dash": "dot"}}
        for k in (0.8, 1.0, 1.2)
    ]  # fmt: skip
    dots: list[Figure] = [
        {"type": "scattergl" if len(cases) > 400 else "scatter", "mode": "markers", "name": plain(name),
         "x": [c.predicted for c in rows], "y": [c.measured for c in rows],
         "hovertext": [plain(c.label, 120) for c in rows], "marker": {"color": colors[i % len(colors)], "size": 5,
         "opacity": 0.7}, "hovertemplate": "%{hovertext}<br>predicted %{x:.4g}<br>measured %{y:.4g}<extra></extra>"}
        for i, (name, rows) in enumerate(groups.items())
    ]  # fmt: skip
    scale = {"type": "log", "range": [math.log10(low), math.log10(high)], "exponentformat": "power", "dtick": 1}
    across, up = axis(f"predicted {quantity}", **scale), axis(f"measured {quantity}", **scale)
    figure = {"data": [*lines, *dots], "layout": layout(430, xaxis=across, yaxis=up)}
    inside = sum(abs(c.error) <= 0.2 for c in cases)
    text = f"On the line the prediction is perfect; {inside} of {len(cases)} lie within ±20 % (outer lines)."
    return Chart(f"{f.file}-{quantity}".replace(".", "-"), f"{f.file}: {quantity}", text, figure, wide=False)
