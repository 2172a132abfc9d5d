"""`ridgeline probe`: the profile of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, command_line, next_command, say, store


@app.command()
def probe(
    ranks: Annotated[int, typer.Option(help="Maximum number of processes that share the machine.")] = 2,
    quick: Annotated[bool, typer.Option(help="Run fewer and shorter measurements.")] = False,
    sweep: Annotated[
        str | None, typer.Option(help="Measure by size instead: collectives, copies, or both with a comma.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine (operators, memory, loopback collectives) and keep the profile as device `local`.

    With `--sweep` the profile stays as it is: collectives and copies are measured by size, beside what it predicts.
    """
    if sweep is not None:
        return _sweep([name.strip() for name in sweep.split(",")], ranks, quick, json)
    from ridgeline.measure.probing.probe import probe as run
    from ridgeline.report.console import Status, device_table

    with Status("probing this machine") as status:
        device, file = run(max_ranks=ranks, quick=quick, progress=status.message)
    say(f"profile kept in {file}")
    print(device.model_dump_json(indent=2)) if json else device_table(device)
    next_command("predict", "llama-mini", "--on", "local")


def _sweep(kinds: list[str], ranks: int, quick: bool, json: bool) -> None:
    from ridgeline.report.console import Status, print_tables
    from ridgeline.report.study_tables import study_tables
    from ridgeline.study.sweep import sweep

    with Status("sweeping sizes") as status:
        found = sweep(kinds, ranks, quick, status.message, command_line())
    stored = store().add_study(found)
    print(found.to_json()) if json else print_tables(*study_tables(found))
    say(f"stored as {stored}; the pictures: `ridgeline report {stored} -o sweep.html`")
