"""Measuring for real: probe, cells in their own processes, statistics, dissection, comparison."""
