"""`ridgeline runs`: the stored results."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, store


@app.command()
def runs(
    limit: Annotated[int, typer.Option(min=1, help="Show the N most recent runs.")] = 20,
    json: Json = False,
) -> None:
    """List stored results."""
    import json as js

    from ridgeline.report.console import print_runs

    rows = store().list(limit=limit)
    if json:
        print(js.dumps([row._asdict() for row in rows]))
    else:
        print_runs(rows)
