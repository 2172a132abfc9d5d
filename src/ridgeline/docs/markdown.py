"""Markdown of the generated pages."""

from __future__ import annotations


def table(head: str, rows: list[list[str]]) -> str:
    """A table under ``head``, its first line with the bars."""
    columns = head.count("|") - 1
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "|---" * columns + "|", *body])
