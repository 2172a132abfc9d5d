"""One measured process, by task."""
