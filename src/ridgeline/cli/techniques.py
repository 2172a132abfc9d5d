"""`ridgeline techniques`: the cards of techniques and systems, and the support matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import Json, app
from ridgeline.spec.errors import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ridgeline.techniques.matrix import Pair


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(help="Show one technique's card and options, or one system's.")] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show which pairs work together, and why the others do not.")
    ] = False,
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
        print(js.dumps([p.model_dump() for p in pairs], indent=2)) if json else _print_matrix(pairs)
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


def _print_matrix(pairs: Sequence[Pair]) -> None:
    """The support matrix as a triangle, and the reasons below it."""
    from ridgeline.report.console import print_tables
    from ridgeline.report.table import Column, Table

    names = sorted({p.a for p in pairs} | {p.b for p in pairs})
    status = {(p.a, p.b): p for p in pairs}
    cells = []
    for a in names:
        row = [a]
        for b in names:
            p = status.get((a, b)) or status.get((b, a))
            row.append("" if p is None else p.mark)
        cells.append(row)
    reasons = [f"{p.a} × {p.b}: {p.reason}" for p in pairs if p.status == "refused"]
    columns = [Column("", align="left"), *(Column(n) for n in names)]
    title = "support matrix (✓ has a passing parity test, ○ predicted only, ✗ refused)"
    print_tables(Table(title, columns, cells, notes=reasons))
