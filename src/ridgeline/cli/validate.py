"""`ridgeline validate`: predictions against measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, say


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(metavar="DIR_OR_CSV", help="Measured data: a CSV file, or a directory.")],
    plot: Annotated[
        Path | None, typer.Option(help="Also write an HTML page of measured against predicted values.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Also write every row with its prediction, interval and error as CSV.")
    ] = None,
    json: Json = False,
) -> None:
    """How far are predictions from measurements? Judges every row of the files, beside a trivial baseline."""
    import json as js

    from ridgeline.report import console
    from ridgeline.validate.run import run
    from ridgeline.validate.validation_report import (
        assumed_lines,
        regret_table,
        rows_csv,
        score_table,
        skipped_lines,
        validation_html,
        worst_table,
    )

    with console.Status(f"validating {path.name}") as status:
        report = run(path, lambda file, at, rows: status.progress.update(status.task, note=f"{file} {at}/{rows}"))
    if plot:
        validation_html(report, plot)
        say(f"wrote {plot}")
    if rows:
        say(f"wrote {rows_csv(report, rows)}")
    if json:
        print(js.dumps(report.as_dict()))
    else:
        tables = [score_table(report), regret_table(report), worst_table(report)]
        console.print_tables(*(t for t in tables if t is not None))
        for line in [*skipped_lines(report), *assumed_lines(report)]:
            say(line)
    if not report.judged:
        say("no row could be judged")
        raise typer.Exit(1)
