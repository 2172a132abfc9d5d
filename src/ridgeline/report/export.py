"""Results, ablations and studies as files: HTML, Markdown, CSV, JSON, and the picture of an ablation as SVG."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.report.files import write_atomic
from ridgeline.report.study_tables import study_html, study_markdown
from ridgeline.report.tables import to_csv, to_markdown
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Result
from ridgeline.spec.study import Study

FORMATS = ("html", "md", "csv", "json", "svg")


def load_any(path: Path) -> Result | Ablation | Study:
    """A result, ablation or study file, told apart by its schema. Raises :class:`UserError` if it is none of them."""
    try:
        text = path.read_text(encoding="utf-8")
        schema = json.loads(text).get("schema", "")
    except (ValueError, AttributeError, OSError):
        raise UserError(
            f"{path} is not a result, ablation or study file", "give one that ridgeline wrote as JSON"
        ) from None
    if str(schema).startswith("ridgeline.ablation/"):
        return Ablation.load(path)
    if str(schema).startswith("ridgeline.study/"):
        return Study.load(path)
    return Result.from_json(text, str(path))


def export(what: Result | Ablation | Study, format: str, out: Path | None) -> str | None:
    """Write ``what`` to ``out``, or return the text when ``out`` is None (HTML needs a file)."""
    if format == "html":
        from ridgeline.report.html import ablation_html, result_html

        if out is None:
            raise UserError("HTML goes to a file", "add -o report.html")
        if isinstance(what, Study):
            study_html(what, out)
        elif isinstance(what, Ablation):
            ablation_html(what, out)
        else:
            result_html(what, out)
        return None
    text = _text(what, format)
    if out is None:
        return text
    write_atomic(out, text)
    return None


def _text(what: Result | Ablation | Study, format: str) -> str:
    if format == "svg":
        from ridgeline.report.charts.svg import ablation_svg

        if not isinstance(what, Ablation):
            raise UserError(
                "an SVG is drawn of an ablation, and this is one result", "write it as html, which has charts"
            )
        return ablation_svg(what)
    if isinstance(what, Study):
        if format == "csv":
            raise UserError("a study has a table per file", "`ridgeline study FILE --csv DIRECTORY` writes them")
        return what.to_json() if format == "json" else study_markdown(what)
    return what.to_json() if format == "json" else to_csv(what) if format == "csv" else to_markdown(what)
