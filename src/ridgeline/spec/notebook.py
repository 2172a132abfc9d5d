"""What results show of themselves in a notebook."""

from __future__ import annotations

import importlib
from typing import Any


class InNotebook:
    """Tables, data frames and charts of a Result, an Ablation or a Study; made by :mod:`ridgeline.report`, which stands
    above this floor and is only loaded when asked for."""

    def _repr_html_(self) -> str:
        """Its tables, as a notebook's cell shows them."""
        return str(_made("tables_html", self))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` in SI units: a row per metric of a result, per plan of an ablation, per cell of a
        study. Raises :class:`~ridgeline.spec.errors.UserError` without pandas."""
        return _made("data_frame", self)

    def plot(self) -> Any:
        """Its report with all charts, as a notebook's cell shows it; ``.save(path)`` writes it to a file."""
        return _made("Plot", self)


def _made(name: str, what: InNotebook) -> Any:
    return getattr(importlib.import_module("ridgeline.report.notebook"), name)(what)
