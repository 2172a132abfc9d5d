"""`ridgeline compare`: two results, metric by metric."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import Json, app, stored
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.spec.result import Result


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="Stored id or result file.")],
    b: Annotated[str, typer.Argument(help="Stored id or result file.")],
    force: Annotated[bool, typer.Option(help="Compare even if the environments differ.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Compare two results, metric by metric; refuses unlike environments unless --force."""
    from ridgeline.measure.compare import compare as run
    from ridgeline.report.console import print_comparison

    comparison = run(_result(a), _result(b), force=force)
    if out:
        from ridgeline.report.html import comparison_html

        comparison_html(comparison, out)
    print(comparison.model_dump_json(indent=2)) if json else print_comparison(comparison)


def _result(what: str) -> Result:
    from ridgeline.spec.result import Result
    from ridgeline.spec.study import Study

    found = stored(what)
    if not isinstance(found, Result):
        kind = "a study" if isinstance(found, Study) else "an ablation"
        raise UserError(f"{what} is {kind}, not one result", "compare two results; `ridgeline runs` lists them")
    return found
