"""`ridgeline report`: a stored result or ablation as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, say, stored
from ridgeline.spec.errors import unknown


@app.command()
def report(
    what: Annotated[str, typer.Argument(help="Stored id, result file or ablation file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file; its suffix chooses the format.")] = None,
    format: Annotated[str | None, typer.Option(help="html, md, csv or json; svg: the chart of an ablation.")] = None,
    json: Json = False,
) -> None:
    """Write a stored result or ablation as HTML, Markdown, CSV, JSON or SVG (default: Markdown on standard output)."""
    from ridgeline.report.export import FORMATS, export

    chosen = "json" if json else format or (out.suffix.lstrip(".") if out and out.suffix else "md")
    if chosen not in FORMATS:
        raise unknown("format", chosen, FORMATS)
    text = export(stored(what), chosen, out)
    if text is not None:
        print(text)
    elif out is not None:
        say(f"wrote {out}")
