"""Results, ablations and studies in a notebook: tables, data frames, and the report with its charts in a frame."""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.report.export import export
from ridgeline.report.study_tables import cell_records, study_tables
from ridgeline.report.table import html
from ridgeline.report.tables import ablation_tables, records, result_tables
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Result
from ridgeline.spec.study import Study

if TYPE_CHECKING:
    import pandas

Shown = Result | Ablation | Study
HEIGHT = 640
"""Pixels of the frame in which a notebook shows a report."""


def tables_html(what: Shown) -> str:
    """The tables that the command line prints, as HTML."""
    if isinstance(what, Study):
        tables = study_tables(what)
    else:
        tables = ablation_tables(what) if isinstance(what, Ablation) else result_tables(what)
    return "".join(html(t) for t in tables)


def data_frame(what: Shown) -> pandas.DataFrame:
    """A row per metric (result), plan (ablation) or cell (study), in SI units. Raises :class:`UserError` without
    pandas."""
    try:
        import pandas
    except ImportError:
        raise UserError("pandas is not installed", "pip install pandas") from None
    if isinstance(what, Study):
        return pandas.DataFrame([{"table": t.name, **row} for t in what.tables for row in cell_records(what, t)])
    return pandas.DataFrame(records(what))


class Plot:
    """The HTML report of ``what``, charts included; it needs no network."""

    def __init__(self, what: Shown) -> None:
        self.what = what

    def save(self, path: str | Path) -> Path:
        """Write it to an ``.html`` file; returns the path."""
        export(self.what, "html", Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            text = self.save(Path(folder) / "report.html").read_text(encoding="utf-8")
        return f'<iframe srcdoc="{escape(text)}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": "a report: .save(path) writes it", "text/html": self._repr_html_()}
