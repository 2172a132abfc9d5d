"""One measured cell of any task."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.spec.experiment import Experiment

_CELLS = {
    "pretrain": "ridgeline.measure.cells.training_cell:training_cell",
    "finetune": "ridgeline.measure.cells.training_cell:training_cell",
    "generate": "ridgeline.measure.cells.generation_cell:generation_cell",
    "serve": "ridgeline.measure.cells.serving_cell:serving_cell",
    "compress": "ridgeline.measure.cells.compression_cell:compression_cell",
}
"""The function that measures each task, imported when it is used: each needs other packages."""


def measure_cell(e: Experiment, options: CellOptions, here: RankContext) -> dict[str, Any]:
    """Measure the experiment once, in this process; a measured Result as plain data."""
    result: dict[str, Any] = resolve_name(_CELLS[e.task])(e, options, here)
    return result
