"""Charts as plain data for `web/src/report.ts`: one file per kind, each chart with a table of the same numbers."""

from ridgeline.report.charts.chart import Chart

__all__ = ["Chart"]
