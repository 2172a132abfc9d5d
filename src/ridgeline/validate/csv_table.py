"""Reading measured data: CSV files of the known schemas, with every bad cell named by line and column."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ridgeline.spec.errors import UserError

T = TypeVar("T", int, float, bool)
EMPTY = {"", "?", "na", "nan", "none", "null"}
"""Values that mean "not published"."""
_YES = {"true", "t", "yes", "y", "on"}
_NO = {"false", "f", "no", "n", "off"}
_MOST = 1e15
MOST_LAYERS, MOST_TOKENS, MOST_DEVICES = 10_000, 10_000_000, 1_000_000
"""Of a model, of a sequence, of a run: beyond these a cell is a slip, which would take minutes to predict."""


class BadCell(Exception):
    """A cell that cannot be read; the row is skipped and counted."""


@dataclass(slots=True)
class CsvRow:
    """One line of a CSV file, with typed access that names the column in its errors."""

    line: int
    cells: dict[str, str]
    assumed: dict[str, str] = field(default_factory=dict)
    """What was taken for cells that are empty, and for names and formats whose column is missing."""

    def has(self, column: str) -> bool:
        """Whether the column exists and has a value."""
        return self.cells.get(column, "").strip().lower() not in EMPTY

    def text(self, column: str, default: str | None = None) -> str:
        """The cell as text."""
        if self.has(column):
            return self.cells[column].strip()
        if default is None:
            raise BadCell(f"column {column!r} is empty")
        if default:
            self.assumed[column] = default
        return default

    def _default(self, column: str, value: T) -> T:
        if column in self.cells:
            self.assumed[column] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:g}"
        return value

    def number(self, column: str, default: float | None = None, *, above: float | None = None) -> float:
        """The cell as a finite number, larger than ``above`` where given."""
        if not self.has(column):
            if default is None:
                raise BadCell(f"column {column!r} is empty")
            return self._default(column, default)
        try:
            value = float(self.cells[column])
        except ValueError:
            raise BadCell(f"column {column!r}: {self.cells[column]!r} is not a number") from None
        if not math.isfinite(value):
            raise BadCell(f"column {column!r}: {self.cells[column]!r} is not finite")
        if above is not None and not value > above:
            raise BadCell(f"column {column!r}: {self.cells[column]!r} is not larger than {above:g}")
        return value

    def count(self, column: str, default: int | None = None, least: int = 1, most: float = _MOST) -> int:
        """The cell as a whole number of at least ``least`` and at most ``most``."""
        value = self.number(column, default)
        if value != int(value) or value < least:
            raise BadCell(f"column {column!r}: {value:g} is not a whole number of at least {least}")
        if value > most:
            raise BadCell(f"column {column!r}: {value:g} is more than {most:.0e}")
        return int(value)

    def flag(self, column: str, default: bool) -> bool:
        """The cell as yes or no: 1/0, true/false, yes/no; a version (``2``, ``v3``, ``fa2``) is a yes."""
        text = self.text(column, "").lower()
        if not text:
            return self._default(column, default)
        if text in _NO or re.fullmatch(r"0+(\.0*)?", text):
            return False
        if text in _YES or re.fullmatch(r"[a-z]*[ _-]?v?\d+(\.\d+)*", text):
            return True
        raise BadCell(f"column {column!r}: {self.cells[column]!r} is neither yes nor no")


@dataclass(slots=True)
class Skip:
    """A skipped row, and why."""

    line: int
    reason: str


@dataclass(slots=True)
class CsvTable:
    """A CSV file: its columns and its rows."""

    path: Path
    columns: tuple[str, ...]
    rows: list[CsvRow]
    skipped: list[Skip] = field(default_factory=list)

    def __iter__(self) -> Iterator[CsvRow]:
        return iter(self.rows)


def read_table(path: Path) -> CsvTable:
    """Read a CSV file, with or without a byte-order mark; invalid UTF-8 in rows is replaced.

    Raises :class:`UserError` if it is not CSV or its header not UTF-8; rows of another length are skipped and counted.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as f:
            reader = csv.reader(f, skipinitialspace=True)
            header = next(reader, None)
            if header and {"\0", "\ufffd"} & {*"".join(header)}:  # UTF-16, as Excel's Unicode text, or no text
                raise UserError(f"{path} is not text in UTF-8", "save it as CSV in UTF-8")
            if not header or len(header) < 2:
                raise UserError(f"{path} has no CSV header", "the first line must name the columns, comma-separated")
            columns = tuple(c.strip().lower() for c in header)
            twice = sorted({c for c in columns if c and columns.count(c) > 1})
            if twice:
                raise UserError(f"{path}, line 1: column {twice[0]!r} is there twice", "give every column its own name")
            table = CsvTable(path, columns, [])
            for cells in reader:
                if not cells or all(not c.strip() for c in cells):
                    continue
                if len(cells) != len(columns):
                    table.skipped.append(Skip(reader.line_num, f"{len(cells)} cells for {len(columns)} columns"))
                else:
                    table.rows.append(CsvRow(reader.line_num, dict(zip(columns, cells, strict=True))))
            return table
    except (OSError, csv.Error) as e:
        raise UserError(f"{path} cannot be read as CSV: {e}", "give a CSV file or a directory of them") from None
