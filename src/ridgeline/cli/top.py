"""`ridgeline top`: jobs that run on this machine now."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.base import Json, app


@app.command()
def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
    json: Json = False,
) -> None:
    """Show running jobs: training, ablations, probes, compressions. Ctrl-C ends the display, not the jobs.

    Without a terminal, the table is printed once.
    """
    import json as js
    from dataclasses import asdict

    from ridgeline.jobs.live import running
    from ridgeline.report.console import print_tables, watch_table
    from ridgeline.report.live_jobs import live_table

    if json:
        print(js.dumps([asdict(job) | {"memory_bytes": job.memory()} for job in running()]))
        return
    if once or not watch_table(lambda: live_table(running()), interval):
        print_tables(live_table(running()))
