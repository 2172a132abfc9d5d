"""Measured operators of one device, from files of the gemm, attention and collectives schemas, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ridgeline import catalog
from ridgeline.graph.graph import Op
from ridgeline.predict.calibrate import TimedSample
from ridgeline.spec.errors import UserError
from ridgeline.validate import attention_rows as attention
from ridgeline.validate import collective_rows as collectives
from ridgeline.validate import gemm_rows as gemm
from ridgeline.validate.csv_table import BadCell, CsvRow, CsvTable, Skip, read_table

OPERATORS: dict[str, Callable[[CsvRow], list[Op]]] = {
    gemm.NAME: gemm.ops,
    attention.NAME: lambda row: [attention.op_of(row)],
    collectives.NAME: lambda row: [collectives.op_of(row)],
}
"""By schema: what one row measured."""
_REQUIRED = {m.NAME: m.REQUIRED for m in (gemm, attention, collectives)}


def samples(paths: list[Path], device: str) -> tuple[list[TimedSample], list[Skip]]:
    """The rows of ``device`` (a catalog name, its aliases too) and what was skipped.

    Directories stand for their CSV files; files of other schemas are skipped. Raises :class:`UserError` when there
    is no row at all that can be read.
    """
    files = [f for p in paths for f in (sorted(p.glob("*.csv")) if p.is_dir() else [p])]
    found: list[TimedSample] = []
    skipped: list[Skip] = []
    malformed: list[Skip] = []
    others: set[str] = set()
    for file in files:
        table = read_table(file)
        schema = next((n for n, required in _REQUIRED.items() if set(required) <= set(table.columns)), None)
        if schema is None:
            if len(files) == 1:
                raise UserError(
                    f"{file} is not of an operator schema",
                    "columns needed: " + "; ".join(f"{n}: {','.join(r)}" for n, r in _REQUIRED.items()),
                )
            continue
        _take(table, OPERATORS[schema], device, found, skipped, others)
        malformed += [Skip(s.line, f"{table.path.name}: {s.reason}") for s in table.skipped]
    if not found and (skipped or (malformed and not others)):
        first = (skipped or malformed)[0]
        raise UserError(
            f"no row of device {device!r} in {', '.join(map(str, paths))} can be read: "
            f"line {first.line}: {first.reason}",
            "fix the rows",
        )
    if not found:
        held = f"; they hold {', '.join(sorted(others))}" if others else ""
        raise UserError(
            f"no row of device {device!r} in {', '.join(map(str, paths))}{held}", "name a device that they hold"
        )
    return found, [*skipped, *malformed]


def _take(
    table: CsvTable, ops: Callable[[CsvRow], list[Op]], device: str, found: list[TimedSample], skipped: list[Skip],
    others: set[str],
) -> None:  # fmt: skip
    for row in table:
        try:
            name = row.text("device")
            if not same_device(name, device):
                others.add(name)
            elif row.text("link", "intra-node").lower().startswith("intra"):
                found.append(TimedSample(tuple(ops(row)), row.number("seconds", above=0)))
        except (BadCell, UserError) as e:
            skipped.append(Skip(row.line, f"{table.path.name}: {e}"))


def as_samples(rows: Iterable[Mapping[str, object]]) -> list[TimedSample]:
    """Measured rows in the columns of the gemm or attention schema."""
    out = []
    for i, cells in enumerate(rows, 1):
        row = CsvRow(i, {k: str(v) for k, v in cells.items()})
        schema = next(n for n, required in _REQUIRED.items() if set(required) <= set(cells))
        out.append(TimedSample(tuple(OPERATORS[schema](row)), row.number("seconds", above=0)))
    return out


def same_device(a: str, b: str) -> bool:
    """Whether two names stand for one device."""
    names = {catalog.DEVICE_ALIASES.get(x.strip().lower(), x.strip().lower()) for x in (a, b)}
    return len(names) == 1
