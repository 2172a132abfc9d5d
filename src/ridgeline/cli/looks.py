"""Commands that show what is stored and what is known: runs, compare, report, techniques, models, devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, app, say, store
from ridgeline.spec.errors import UserError, unknown

if TYPE_CHECKING:
    from ridgeline.spec.result import Result

# ---- look at results ----------------------------------------------------------------------------------------------


@app.command()
def runs(
    limit: Annotated[int, typer.Option(help="Newest so many.")] = 20,
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


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="Stored id or result file.")],
    b: Annotated[str, typer.Argument(help="Stored id or result file.")],
    force: Annotated[bool, typer.Option(help="Compare although the environments differ.")] = False,
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


@app.command()
def report(
    what: Annotated[str, typer.Argument(help="Stored id, result file or ablation file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file; its suffix chooses the format.")] = None,
    format: Annotated[str | None, typer.Option(help="html, md, csv or json.")] = None,
    json: Json = False,
) -> None:
    """Write a stored result or ablation as HTML, Markdown, CSV or JSON (Markdown to standard output by default)."""
    from ridgeline.report.export import FORMATS, export

    chosen = "json" if json else format or (out.suffix.lstrip(".") if out and out.suffix else "md")
    if chosen not in FORMATS:
        raise unknown("format", chosen, FORMATS)
    text = export(_any(what), chosen, out)
    if text is not None:
        print(text)
    elif out is not None:
        say(f"wrote {out}")


# ---- the catalogue ------------------------------------------------------------------------------------------------


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(help="Show one technique's card and options, or one system's.")] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Which pairs work together, and why others do not.")] = False,
    json: Json = False,
) -> None:
    """List the techniques and the systems made of them, show a card, or the support matrix."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report import console
    from ridgeline.techniques.cards import card_table, cards, system_card, system_table
    from ridgeline.techniques.matrix import support_matrix

    if matrix:
        pairs = support_matrix()
        print(js.dumps([p.model_dump() for p in pairs], indent=2)) if json else console.print_matrix(pairs)
        return
    found = {c["name"]: c for c in cards()}
    if name is None:
        systems = [catalog.system(s) for s in catalog.systems()]
        if json:
            print(js.dumps([*found.values(), *map(system_card, systems)], indent=2))
        else:
            console.print_cards(list(found.values()))
            console.print_systems(systems)
    elif name in found:
        print(js.dumps(found[name], indent=2)) if json else print(card_table(found[name]))
    elif name in catalog.systems():
        system = catalog.system(name)
        print(js.dumps(system_card(system), indent=2)) if json else print(system_table(system))
    else:
        raise unknown("technique", name, [*found, *catalog.systems()])


@app.command()
def models(name: Annotated[str | None, typer.Argument()] = None, json: Json = False) -> None:
    """List the catalogue's models, or show one."""
    import json as js

    from ridgeline import catalog
    from ridgeline.report.console import print_models

    found = [catalog.model(n) for n in ([name] if name else catalog.models())]
    rows = [{**m.model_dump(exclude_none=True), "parameters": m.num_parameters,
             "active_parameters": m.num_active_parameters} for m in found]  # fmt: skip
    if json:
        print(js.dumps(rows[0] if name else rows, indent=2))
    else:
        print_models(rows, detail=name is not None)


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument()] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the one device as a TOML file.")] = False,
    json: Json = False,
) -> None:
    """List the catalogue's devices (and `local`, once probed), or show one."""
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


def _any(what: str) -> Any:
    from ridgeline.report.export import load_any

    path = Path(what)
    return load_any(path) if path.is_file() else store().get(what)


def _result(what: str) -> Result:
    from ridgeline.spec.result import Result

    found = _any(what)
    if not isinstance(found, Result):
        raise UserError(f"{what} is an ablation, not one result", "compare two results; `ridgeline runs` lists them")
    return found
