"""`ridgeline study`: a benchmark as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import Json, app, command_line, next_command, probed, require_writable, say, store


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY", help="Study file (TOML).")],
    on: Annotated[str | None, typer.Option("--on", help="`local`: measure every cell on this machine, too.")] = None,
    scale: Annotated[
        str, typer.Option(help="With --on local: the small model that stands for every model.")
    ] = "llama-mini",
    csv: Annotated[Path | None, typer.Option(help="Directory for one CSV file per table.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of measured cells (default runs/study-NAME-ID).")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report: .html or .md.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that predict.")] = 2,
    json: Json = False,
) -> None:
    """Run a benchmark of many experiments: the whole grid predicted, its tables, and the findings checked.

    With `--on local` the same tables are measured on this machine with a small model, beside the prediction. An
    interrupted study resumes when the same command is run again.
    """
    from ridgeline import experiments
    from ridgeline.report.console import CountBar, print_tables
    from ridgeline.report.export import export
    from ridgeline.report.study_tables import findings_table, study_csv, study_tables
    from ridgeline.spec.errors import UserError
    from ridgeline.study import load_study, run_study
    from ridgeline.study.cells import StudyScale
    from ridgeline.study.run import count, key

    spec = load_study(file)
    if on not in (None, "local"):
        raise UserError(f"--on {on!r}: a study names its platforms itself", "use `--on local` to measure it here")
    small = None
    if on == "local":
        machine = probed(lambda: experiments.make(scale, "local", {"kind": "generate"}, [])).cluster.device
        small = StudyScale(scale, max(1, machine.sm_count))
    if report and (format := report.suffix.removeprefix(".") or "html") not in ("html", "md", "json"):
        raise UserError(f"a study is not written as {format!r}", "use .html or .md for --report")
    require_writable("--csv", csv)
    require_writable("--report", file=report)
    folder = out or Path("runs") / f"study-{spec.name}-{key(spec, small)}"
    total = 2 * count(small.study(spec)) if small else count(spec)
    try:
        with CountBar(f"study {spec.name}", total) as bar:
            found = run_study(spec, folder, workers, small, bar.advance, command_line())
    except KeyboardInterrupt:
        if small:
            say(f"\ninterrupted; measured cells are kept in {folder}: give the same command again to go on")
        raise
    stored = store().add_study(found)
    if json:
        print(found.to_json())
    else:
        print_tables(*study_tables(found)) if len(found.cells) <= 60 else print_tables(findings_table(found))
    if csv:
        say(f"wrote {', '.join(map(str, study_csv(found, csv)))}")
    if report:
        export(found, format, report)
        say(f"wrote {report}")
    say(f"{len(found.cells)} cells in {found.seconds:.1f} s, stored as {stored}")
    if not report:
        next_command("report", stored, "-o", f"{spec.name}.html")
