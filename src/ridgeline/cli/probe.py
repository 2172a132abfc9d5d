"""`ridgeline probe`: the profile of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, say


@app.command()
def probe(
    ranks: Annotated[int, typer.Option(help="Maximum number of processes that share the machine.")] = 2,
    quick: Annotated[bool, typer.Option(help="Run fewer and shorter measurements.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine (operators, memory, loopback collectives) and keep the profile as device `local`."""
    from ridgeline.measure.probing.probe import probe as run
    from ridgeline.report.console import Status, device_table

    with Status("probing this machine") as status:
        device, file = run(max_ranks=ranks, quick=quick, progress=status.message)
    say(f"profile kept in {file}")
    print(device.model_dump_json(indent=2)) if json else device_table(device)
