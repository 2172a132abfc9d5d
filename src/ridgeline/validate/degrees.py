"""The degree of tensor parallelism of an inference row: stated, or the fewest devices that hold the model."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.spec.errors import Incompatible
from ridgeline.spec.result import Result
from ridgeline.validate.csv_table import MOST_DEVICES, BadCell, CsvRow

_DEGREES = (1, 2, 4, 8)


def tensor_degree(row: CsvRow, predicted: Callable[[int], Result]) -> tuple[int, str]:
    """The row's ``tp`` and, where it is not stated, what was chosen: the fewest devices of 1, 2, 4 and 8 that fit.

    ``predicted``: the row's prediction at a degree. Raises :class:`BadCell` if no degree fits.
    """
    if row.has("tp"):
        return row.count("tp", most=MOST_DEVICES), ""
    why = ""
    for degree in _DEGREES:
        try:
            result = predicted(degree)
        except Incompatible as problem:
            why = str(problem)
            continue
        if result.status == "ok":
            return degree, f"tp not stated: {degree}, the fewest that fit"
        why = result.reason
    raise BadCell(f"column 'tp' is empty, and on none of {', '.join(map(str, _DEGREES))} devices does it fit: {why}")
