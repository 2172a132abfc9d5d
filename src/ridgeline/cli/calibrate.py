"""`ridgeline calibrate`: a device fitted to measured operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import Json, app, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ridgeline.predict.calibrate import Fit


@app.command()
def calibrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="CSV_OR_DIR...", help="CSV files of measured operators (see validate).")
    ],
    device: Annotated[str, typer.Option(help="Device whose rows to fit: a catalog name, an alias, or a device TOML.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the profile (default: the user's device catalog).")
    ] = None,
    json: Json = False,
) -> None:
    """Fit a device's constants to measured operators, and keep them as its profile from now on."""
    import json as js

    from ridgeline import catalog
    from ridgeline.predict.calibrate import calibrate as fit
    from ridgeline.report import console
    from ridgeline.report.files import write_atomic
    from ridgeline.validate.samples import samples

    known = catalog.device(device)
    with console.Status(f"calibrating {known.name}") as status:
        status.message("reading")
        rows, skipped = samples(paths, known.name)
        status.message(f"fitting {len(rows)} rows")
        result = fit(rows, known)
    profile = result.on(known).model_copy(update={"source": f"{known.source}\nCalibrated on {len(rows)} rows."})
    where = None
    if result.fits:
        where = write_atomic(out, catalog.device_toml(profile)) if out else catalog.save_device(profile)
    if json:
        fits = [{"family": f.family, "rows": f.rows, "before": f.before, "after": f.after} for f in result.fits]
        kept = str(where) if where else None
        print(js.dumps({"device": known.name, "profile": kept, "fits": fits, "skipped": len(skipped)}))
    else:
        _print_fits(known.name, result.fits)
    for skip in skipped[:5]:
        say(f"skipped line {skip.line}: {skip.reason}")
    if len(skipped) > 5:
        say(f"{len(skipped)} rows skipped in all")
    if where is None:
        say("too few rows of any family to fit: no profile was written")
        raise typer.Exit(1)
    say(f"profile kept in {where}")


def _print_fits(device: str, fits: Sequence[Fit]) -> None:
    """What calibration did to each family of constants."""
    from ridgeline.report.console import print_tables
    from ridgeline.report.table import Column, Table
    from ridgeline.report.units import percent

    columns = [Column("Family", align="left"), Column("Rows"), Column("Mean error before"), Column("after")]
    rows = [[f.family, str(f.rows), percent(f.before), percent(f.after)] for f in fits]
    print_tables(Table(f"Constants of {device} fitted to measured operators", columns, rows))
