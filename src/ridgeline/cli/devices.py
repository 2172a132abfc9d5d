"""`ridgeline devices`: the catalog's devices."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app
from ridgeline.spec.errors import UserError


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument()] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the device as a TOML file.")] = False,
    json: Json = False,
) -> None:
    """List the catalog's devices (and `local`, once probed), or show one."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report.console import print_devices

    found = [catalog.device(n) for n in ([name] if name else catalog.devices())]
    if toml:
        if name is None:
            raise UserError("--toml needs the name of one device", "ridgeline devices h100-sxm --toml > my-gpu.toml")
        print(catalog.device_toml(found[0]), end="")
        return
    rows = [d.model_dump(mode="json", exclude_none=True) for d in found]
    if json:
        print(js.dumps(rows[0] if name else rows, indent=2))
    else:
        print_devices(found, detail=name is not None)
