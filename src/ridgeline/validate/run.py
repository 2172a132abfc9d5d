"""``ridgeline validate``: every row of every file predicted and compared, nothing dropped silently."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ridgeline import validate
from ridgeline.spec.errors import UserError
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import BadCell, CsvRow, CsvTable, Skip, read_table
from ridgeline.validate.score import PlanChoice, Score, choices, regret_summary, score

WORST = 5
"""Rows listed per file."""
_HOLES = (ValueError, TypeError, ArithmeticError, LookupError, AssertionError)
"""Errors of a model for one row, which do not affect the others."""


class Schema(Protocol):
    """A module of this package that handles one kind of file."""

    NAME: str
    REQUIRED: tuple[str, ...]

    @staticmethod
    def cases(row: CsvRow) -> list[Case]:
        """The row's measured quantities, predicted."""
        ...


@dataclass(slots=True)
class FileReport:
    """The results of one file."""

    file: str
    schema: str
    rows: int
    scores: list[Score]
    worst: list[Case]
    skipped: list[Skip]
    choices: list[PlanChoice]
    cases: list[Case] = field(default_factory=list)

    def assumed(self) -> dict[str, Counter[str]]:
        """By column: what was taken for rows that do not state it, and for how many."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for column, value in (pair for assumed in {c.line: c.assumed for c in self.cases}.values() for pair in assumed):
            found[column][value] += 1
        return dict(sorted(found.items()))


@dataclass(slots=True)
class Report:
    """The whole validation."""

    files: list[FileReport]
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Files of a directory that are of no known schema, and why."""

    @property
    def skipped(self) -> int:
        """Number of rows that could not be compared."""
        return sum(len(f.skipped) for f in self.files)

    @property
    def judged(self) -> int:
        """Number of measured quantities that were predicted."""
        return sum(len(f.cases) for f in self.files)

    def as_dict(self) -> dict[str, Any]:
        """The ``--json`` document; shares as fractions."""
        found = [c for f in self.files for c in f.choices]
        return {
            "groups": [asdict(s) for f in self.files for s in f.scores],
            "regret": regret_summary(found),
            "skipped": self.skipped,
            "regret_by_file": {f.file: regret_summary(f.choices) for f in self.files if f.choices},
            "choices": [asdict(c) for c in found],
            "skipped_rows": [{"file": f.file, **asdict(s)} for f in self.files for s in f.skipped],
            "not_stated": [
                {"file": f.file, "column": name, "taken": dict(values)}
                for f in self.files
                for name, values in f.assumed().items()
            ],
            "ignored_files": [{"file": name, "reason": why} for name, why in self.ignored],
            "worst": [
                {
                    "file": f.file,
                    "line": c.line,
                    "label": c.label,
                    "quantity": c.quantity,
                    "measured": c.measured,
                    "predicted": c.predicted,
                    "error": c.error,
                    "why": c.why,
                }
                for f in self.files
                for c in f.worst
            ],
        }


def schemas() -> list[Schema]:
    """Every schema, found by importing the files of this package; the most demanding first."""
    found: list[Any] = []
    for info in pkgutil.iter_modules(validate.__path__):
        module = importlib.import_module(f"ridgeline.validate.{info.name}")
        if hasattr(module, "REQUIRED"):
            found.append(module)
    return sorted(found, key=lambda m: (-len(m.REQUIRED), m.NAME))


def schema_of(table: CsvTable) -> Schema:
    """The schema whose required columns the file has. Raises :class:`UserError` naming the nearest one's gaps."""
    known = schemas()
    for schema in known:
        if set(schema.REQUIRED) <= set(table.columns):
            return schema
    nearest = max(known, key=lambda s: len(set(s.REQUIRED) & set(table.columns)) / len(s.REQUIRED))
    missing = [c for c in nearest.REQUIRED if c not in table.columns]
    raise UserError(
        f"{table.path}, line 1: its columns are of no known schema; nearest is {nearest.NAME!r}, which also needs"
        f" {', '.join(missing)}",
        "columns that each schema needs: " + "; ".join(f"{s.NAME}: {','.join(s.REQUIRED)}" for s in known),
    )


def run(path: Path, progress: Callable[[str, int, int], None] | None = None) -> Report:
    """Validate against one CSV file, or every CSV file of a directory. Raises :class:`UserError` if no row fits."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"no file or directory at {path}", "give a CSV file of measurements, or a directory of them")
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no .csv file in {path}", "give a directory that holds CSV files of measurements")
    report = Report([])
    for file in files:
        try:
            table = read_table(file)
            schema = schema_of(table)
        except UserError as e:
            if not path.is_dir():
                raise
            report.ignored.append((file.name, str(e)))
            continue
        report.files.append(_file(file.name, schema, table, progress))
    if not report.files:
        raise UserError(f"no file in {path} is of a known schema: {report.ignored[0][1]}")
    return report


def _file(name: str, schema: Schema, table: CsvTable, progress: Callable[[str, int, int], None] | None) -> FileReport:
    cases: list[Case] = []
    skipped = list(table.skipped)
    for i, row in enumerate(table):
        try:
            for case in schema.cases(row):
                why = _unsound(case)
                if why:
                    skipped.append(Skip(row.line, why))
                else:
                    cases.append(replace(case, line=row.line, assumed=tuple(sorted(row.assumed.items()))))
        except (BadCell, UserError) as e:
            skipped.append(Skip(row.line, str(e)))
        except _HOLES as e:
            skipped.append(Skip(row.line, f"cannot be predicted: {type(e).__name__}: {_first_line(e)}"))
        if progress and i % 64 == 0:
            progress(name, i, len(table.rows))
    skipped.sort(key=lambda s: s.line)
    return FileReport(
        name,
        schema.NAME,
        len(table.rows) + len(table.skipped),
        score(name, cases),
        _worst(cases),
        skipped,
        choices(name, cases),
        cases,
    )


def _worst(cases: list[Case]) -> list[Case]:
    """The worst cases; of rows that were measured several times, or judged in two ways, only the worst."""
    found: dict[tuple[str, str], Case] = {}
    for c in sorted(cases, key=lambda c: -abs(math.log(c.predicted / c.measured))):
        found.setdefault((c.label, c.quantity), c)
    return list(found.values())[:WORST]


def _unsound(c: Case) -> str:
    """Error of a case; empty: none. A prediction that is not a positive number is our error."""
    if not (math.isfinite(c.predicted) and c.predicted > 0):
        return f"{c.quantity} was predicted as {c.predicted}: no positive number"
    if not (math.isfinite(c.measured) and c.measured > 0):
        return f"column {c.quantity!r}: {c.measured} is not a positive number"
    if not math.isfinite(c.error):
        return f"{c.quantity} {c.measured} and its prediction {c.predicted} have no ratio"
    return ""


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [""])[0]
