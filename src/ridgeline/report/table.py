"""Table: titles, headers and cells as text, rendered as Markdown, for a terminal, or as HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.report.definitions import define

if TYPE_CHECKING:
    from rich.console import Group

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A header. ``key`` names its definition."""

    title: str
    key: str = ""
    align: Literal["left", "right"] = "right"


@dataclass
class Table:
    """Rows of text under headers. ``total``: the last row is a sum. ``metrics``: each row begins with a metric."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    total: bool = False
    metrics: bool = False

    def without_empty_columns(self) -> Table:
        """Without columns that have no values; the first one stays."""
        keep = [i for i in range(len(self.columns)) if i == 0 or any(r[i] not in ("", "–", "– | –") for r in self.rows)]
        return self.only(keep)

    def only(self, keep: Sequence[int]) -> Table:
        """The columns with these indices."""
        rows = [[r[i] for i in keep] for r in self.rows]
        return Table(self.title, [self.columns[i] for i in keep], rows, list(self.notes), self.total, self.metrics)

    @property
    def width(self) -> int:
        """Characters that it takes in a terminal."""
        cells = [[c.title for c in self.columns], *self.rows]
        return sum(max(len(r[i]) for r in cells) + 2 for i in range(len(self.columns)))


def markdown(tables: Iterable[Table]) -> str:
    """Pipe tables that paste into an issue, cells padded so that the source reads too."""
    return "\n\n".join(_markdown(t) for t in tables) + "\n"


def rich(tables: Iterable[Table]) -> Group:
    """For ``rich.print``."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = []
    for t in tables:
        grid = RichTable(title=Text(t.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                         show_footer=False, pad_edge=False, padding=(0, 1))  # fmt: skip
        for i, c in enumerate(t.columns):
            grid.add_column(Text(c.title), justify=c.align, overflow="fold", no_wrap=i == 0)
        for i, row in enumerate(t.rows):
            if t.total and i == len(t.rows) - 1:
                grid.add_section()
            grid.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        parts.append(grid)
        parts += [Text(f"  {n}", style="dim") for n in t.notes]
    return Group(*parts)


STYLES = {"faster": "green", "better": "green", "✓": "green", "slower": "red", "worse": "red", "✗": "red"}


def html(table: Table) -> str:
    """A table element with the definition of each column behind a "?"."""
    head = "".join(f'<th class="{c.align}" scope="col">{escape(c.title)}{hint(c.key)}</th>' for c in table.columns)
    body = []
    for i, row in enumerate(table.rows):
        kind = ' class="total"' if table.total and i == len(table.rows) - 1 else ""
        texts = [escape(cell) for cell in row]
        if table.metrics:
            texts[0] += hint(row[0])
        marks = zip(table.columns, row, texts, strict=True)
        cells = "".join(f'<td class="{c.align}{_tone(cell)}">{text}</td>' for c, cell, text in marks)
        body.append(f"<tr{kind}>{cells}</tr>")
    notes = "".join(f'<p class="note">{escape(n)}</p>' for n in table.notes)
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{notes}"
    )


def hint(key: str) -> str:
    """A "?" that shows the definition of ``key`` on hover and on keyboard focus; empty without a definition."""
    tip = escape(define(key))
    return f' <span class="hint" tabindex="0" role="note" aria-label="{tip}" data-tip="{tip}">?</span>' if tip else ""


def csv_text(records: Sequence[Record]) -> str:
    """Machine-readable: SI units, whole bytes, an empty cell for an unknown value."""
    out = io.StringIO()
    names = list(dict.fromkeys(k for r in records for k in r))
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in r.items()} for r in records)
    return out.getvalue()


def _tone(cell: str) -> str:
    style = STYLES.get(cell, "red" if cell.startswith("failed") else "")
    return {"green": " good", "red": " bad"}.get(style, "")


def _markdown(t: Table) -> str:
    head = [_cell(c.title) for c in t.columns]
    rows = [[_cell(c) for c in r] for r in t.rows]
    if t.total and rows:
        rows[-1] = [f"**{c}**" if c else c for c in rows[-1]]
    width = [max(3, *(len(r[i]) for r in [head, *rows])) for i in range(len(head))]
    rule = [("-" * (w - 1) + ":") if c.align == "right" else "-" * w for c, w in zip(t.columns, width, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (
            x.rjust(w) if c.align == "right" else x.ljust(w) for x, w, c in zip(cells, width, t.columns, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    parts = [f"**{_cell(t.title)}**", "", line(head), line(rule), *map(line, rows)]
    if t.notes:
        parts += ["", *(f"- {_cell(n)}" for n in t.notes)]
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Text escaped so that Markdown does not read it as markup or as the end of the cell."""
    for mark in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
