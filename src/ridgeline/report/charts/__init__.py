"""Charts as plain data for `web/src/report.ts`: one file per idea, each chart with the table that says the same."""

from ridgeline.report.charts.chart import Chart

__all__ = ["Chart"]
