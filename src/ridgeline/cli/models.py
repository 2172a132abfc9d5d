"""`ridgeline models`: the catalog's models."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app


@app.command()
def models(name: Annotated[str | None, typer.Argument()] = None, json: Json = False) -> None:
    """List the catalog's models, or show one."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report.console import print_models

    found = [catalog.model(n) for n in ([name] if name else catalog.models())]
    rows = [{**m.model_dump(exclude_none=True), "parameters": m.num_parameters,
             "active_parameters": m.num_active_parameters} for m in found]  # fmt: skip
    if name and rows[0]["name"] in catalog.models():
        rows[0]["aliases"] = catalog.model_aliases(rows[0]["name"])
    if json:
        print(js.dumps(rows[0] if name else rows, indent=2))
    else:
        print_models(rows, detail=name is not None)
